"""Benchmark of a load: a checkpoint whose weights become a rank's, beside reading its files, and the memory they take.

    python -m benchmarks.load_time [--gb 0.3] [--rounds 3] [--cold] [--only NAME ...] [--json FILE]

A llama of random bfloat16 weights, about so many GB, and its `holdfast quantize` folders; a minute for each 0.1 GB.
Each load is in a process of its own that has imported what it needs; it first reads the same files whole, into memory
of its own, with one thread: `ratio` is load / read, median of the rounds, which alternate. Files are in the page cache;
`--cold` drops them from it before each reading and each load. `load` is the time until all weights are packed on two
threads, codes made of them included; `checks` is what the proof beside the reference and the self-check, which run the
model, take. CPU times, of all threads, say more than the clock where others use the machine. `memory` is what the
process has more of at the end, by the bytes of the files (with `--quantization`, of those of the quantized folder).
Before it measures, each process takes as much memory in large pages as the files have and gives it back: the host of a
virtual machine may bring memory only when it is first used, which took up to 0.4 s of 0.2 GB here, and a thirtieth of
that the second time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.startup import ROOT
from holdfast.worker.models.quantized_folder import write_quantized

SIZES: Final = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
LAYER_BYTES: Final = 2 * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
VOCABULARY: Final = 8192
SCHEMES: Final = ("int8", "int4", "fp8")
TIMEOUT_S: Final = 300
"""Limit of one load."""
_WIDTH: Final = 140
"""Of the table, whose columns a narrow terminal would cut."""

LOAD: Final = """
import json, mmap, os, re, sys, time
from pathlib import Path
import torch
from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.engine.model_runner import ModelRunner
from holdfast.worker.executors.cpu.library import load_library
import holdfast.worker.models.proof, holdfast.worker.models.stated_layout
from holdfast.worker.models import native_backend

def taken():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(n) for n in re.findall(r"(?:Pss_Anon|Pss_Shmem): +(\\d+)", rollup)) * 1024

folder, quantization = Path(sys.argv[1]), json.loads(sys.argv[2])
def now():
    used = os.times()
    return time.perf_counter(), used.user + used.system

def since(begun):
    return [round(end - start, 4) for start, end in zip(begun, now())]

files = sorted(folder.glob("*.safetensors"))
def drop():
    for path in files if json.loads(sys.argv[3]) else ():
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

load_library()
torch.set_num_threads(2)
room = mmap.mmap(-1, sum(path.stat().st_size for path in files), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
room.madvise(mmap.MADV_HUGEPAGE)
for place in range(0, len(room), mmap.PAGESIZE):
    room[place] = 1
room.close()
drop()
begun, num_bytes = now(), 0
for path in files:
    with path.open("rb", buffering=0) as file:
        room = bytearray(path.stat().st_size)
        num_bytes += file.readinto(room)
        del room
read, before = since(begun), taken()
config = WorkerConfig(
    model=ModelConfig(model=str(folder), device="cpu", quantization=quantization, max_model_len=512),
    parallel=ParallelConfig(num_threads=2),
    cache=CacheConfig(num_blocks=64, block_size=16),
)
asked, packed = [], []
def prepare(*arguments, ask=native_backend.ask_reference, **options):
    begun = now()
    answers = ask(*arguments, **options)
    asked.append(since(begun))
    return answers
def check(*arguments, prove=native_backend.check):
    packed.append(since(begun))
    return prove(*arguments)
native_backend.ask_reference, native_backend.check = prepare, check
drop()
begun = now()
runner = ModelRunner.load(config, SingleRank(), None, torch.device("cpu"))
load = [whole - asking for whole, asking in zip(packed[0], asked[0])]
checks = [whole - own for whole, own in zip(since(begun), load)]
figures = {"read": read, "load": load, "checks": checks, "bytes": num_bytes, "memory": taken() - before}
print(json.dumps(figures))
"""


def plain_checkpoint(folder: Path, gigabytes: float) -> Path:
    """Writes it, of a fixed seed."""
    layers = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    generator = torch.Generator().manual_seed(1)
    hidden, inner, keys = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["hidden_size"] // 4

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(0.02).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": drawn(VOCABULARY, hidden),
        "lm_head.weight": drawn(VOCABULARY, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    rows = {"q_proj": hidden, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    shapes = {f"self_attn.{name}": (count, hidden) for name, count in rows.items()}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    norms = ("input_layernorm", "post_attention_layernorm")
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": drawn(*shape) for name, shape in shapes.items()}
        tensors |= {f"{prefix}{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
    }
    config |= {
        **SIZES,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    config |= {"rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_once(folder: Path, quantization: str | None, is_cold: bool = False) -> dict[str, Any]:
    """One load, in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    command = [sys.executable, "-c", LOAD, str(folder), json.dumps(quantization), json.dumps(is_cold)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cases(folder: Path, gigabytes: float, only: list[str]) -> dict[str, tuple[Path, Path, str | None]]:
    """By name: the folder that is loaded, the one by whose size its memory is measured, and `--quantization`."""
    plain = plain_checkpoint(folder / "plain", gigabytes)
    found: dict[str, tuple[Path, Path, str | None]] = {"bfloat16": (plain, plain, None)}
    for scheme in SCHEMES:
        out = folder / scheme
        write_quantized(plain, out, scheme, lambda *_: None)
        found |= {f"{scheme} folder": (out, out, None), f"--quantization {scheme}": (plain, out, scheme)}
    return {name: case for name, case in found.items() if not only or any(part in name for part in only)}


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def figures(runs: list[dict[str, Any]]) -> list[float]:
    """Medians of reading, of loading, of their ratio and of checks: by the clock, then of CPU time."""
    found = []
    for kind in range(2):
        parts = [(run["read"][kind], run["load"][kind], run["checks"][kind]) for run in runs]
        read, load, checks = (statistics.median(values) for values in zip(*parts, strict=True))
        found += [read, load, statistics.median(own / reading for reading, own, _ in parts), checks]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="read files from the disk")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = ("read", "load", "ratio", "checks")
    columns = ("weights", "GB", *times, *(f"CPU {name}" for name in times), "memory / file")
    table = Table(*columns, title=f"load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        chosen = cases(Path(folder), options.gb, options.only)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
        for number in range(options.rounds):
            for name, (loaded, _, quantization) in chosen.items():
                runs[name].append(load_once(loaded, quantization, options.cold))
                print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
        for name, (_, sized, _) in chosen.items():
            memory = statistics.median(run["memory"] for run in runs[name]) / weight_bytes(sized)
            cells = [runs[name][0]["bytes"] / 1e9, *figures(runs[name]), memory]
            table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    Console(width=_WIDTH).print(table)
    if options.json:
        found = {"load_average": os.getloadavg()[0], "runs": runs}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
