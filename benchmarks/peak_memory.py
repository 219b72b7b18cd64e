"""Benchmark of a start's memory: the peak of each process of a replica against its weights, KV cache and libraries.

    python -m benchmarks.peak_memory [--model demo] [--tensor-parallel-size 2] [--first] [--against WORKTREE]

A replica starts in a process of its own and completes eight prompts. `libraries` is what is resident after all imports
that such a start needs, with the tokenizer; `weights` is this rank's share in the serving dtype; `KV` is the memory
that the leader's cache has taken: large pages, of which each layer begins its own. `peak` is `VmHWM`; `ratio` is
peak / (weights + KV + libraries). With `--first` no layout is kept from an earlier start; where none was shipped
either, Hugging Face's modules are built, and their libraries count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.startup import ROOT, empty_home

TIMEOUT_S: Final = 300
MB: Final = 2**20

_LIBRARIES: Final = """
import sys
import holdfast.cluster.offline.llm, holdfast.worker.engine.model_runner, tokenizers, safetensors.torch
if "first" in sys.argv:
    from transformers import AutoConfig, AutoModelForCausalLM
    import transformers.modeling_utils, importlib
    importlib.import_module(f"transformers.models.{sys.argv[2]}.modeling_{sys.argv[2]}")
    import torch
    torch.nn.functional.linear(torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))
from holdfast.router.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(sys.argv[3])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""

_START: Final = """
import ctypes, gc, json, mmap, os, sys
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.worker.sampling_params import SamplingParams

def peak(pid):
    return next(int(l.split()[1]) for l in open(f"/proc/{pid}/status") if l.startswith("VmHWM"))

def resident_kb(tensor):
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE // 1024

def cached_kb():
    from holdfast.worker.executors.cpu.cache import TiledCache
    gc.unfreeze()  # frozen objects are not listed
    caches = [found for found in gc.get_objects() if isinstance(found, TiledCache)]
    return sum(resident_kb(layer.pages) for cache in caches for layer in cache._layers)

model, ranks = sys.argv[1], int(sys.argv[2])
with InferenceEngine(model, {"parallel": {"tensor_parallel_size": ranks}}) as engine:
    handles = [engine.submit_request(f"{n} is the capital of France", SamplingParams(max_tokens=16)) for n in range(8)]
    for handle in handles:
        handle.result(120)
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    peaks = [peak("self"), *map(peak, children)]
    kind = "first" if "transformers.modeling_utils" in sys.modules else "later"
    print(json.dumps({"kind": kind, "kv": cached_kb(), "peaks": peaks}))
"""


def run(code: str, tree: Path, home: Path, *arguments: str) -> str:
    environ = dict(os.environ, PYTHONPATH=f"{tree}:{tree / 'proto'}", HOME=str(home))
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, cwd=tree, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout.splitlines()[-1]


def weight_kb(model: str, ranks: int) -> int:
    from holdfast.cluster.bundled_model.bundled_model import located
    from holdfast.worker.config import ModelConfig, ParallelConfig, WorkerConfig
    from holdfast.worker.models.memory import MemoryEstimator

    parallel = ParallelConfig(tensor_parallel_size=ranks)
    return (
        MemoryEstimator(located(WorkerConfig(model=ModelConfig(model=model), parallel=parallel))).weight_bytes // 1024
    )


def measure(tree: Path, model: str, ranks: int, *, first: bool) -> list[dict[str, Any]]:
    """A row for each process, in kB."""
    model_type = json.loads((folder_of(model) / "config.json").read_text())["model_type"]
    with tempfile.TemporaryDirectory() as folder:
        home = empty_home(folder)
        if not first:
            run(_START, tree, home, model, str(ranks))
        found = json.loads(run(_START, tree, home, model, str(ranks)))
        libraries = int(run(_LIBRARIES, tree, home, found["kind"], model_type, str(folder_of(model))))
    weights = weight_kb(model, ranks)
    same = {"kind": found["kind"], "weights": weights, "KV": found["kv"], "libraries": libraries}
    return [{**same, "rank": rank, "peak": peak} for rank, peak in enumerate(found["peaks"])]


def folder_of(model: str) -> Path:
    from holdfast.cluster.bundled_model.bundled_model import bundled_path

    return bundled_path(model) if model == "demo" else Path(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="demo, or a folder: `benchmarks/peers/models.py` makes some")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--first", action="store_true", help="without a layout that was kept")
    parser.add_argument("--against", type=Path, help="another checkout: before")
    options = parser.parse_args()
    table = Table("tree", "start", "rank", "weights", "KV", "libraries", "peak", "ratio", title="MB")
    trees = {"before": options.against.resolve()} if options.against else {}
    for name, tree in {**trees, "now": ROOT}.items():
        for row in measure(tree, options.model, options.tensor_parallel_size, first=options.first):
            parts = [row["weights"], row["KV"], row["libraries"]]
            cells = [f"{kb * 1024 / MB:.0f}" for kb in (*parts, row["peak"])]
            table.add_row(name, row["kind"], str(row["rank"]), *cells, f"{row['peak'] / sum(parts):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
