"""LoRA adapters of all linears beside their base model: tokens per second, and times to load and to replace one.

    python -m benchmarks.adapters MODEL_FOLDER [--rank 16] [--rows 8 32] [--tokens 64] [--rounds 5] [--threads 2]
        [--dtype float32] [--json FILE]

Two engines in one process, one that serves adapters and one that does not, decode the same prompts in turn: without
adapters, with one adapter for all rows, and with as many adapters as rows. Then adapters that are new are loaded one at
a time while nothing runs, and in place of each other while streams run: from the call until the first token of the new
content. Ratios are of CPU time, of all threads; times are medians by the clock, with the least and the largest.
`--dtype`: of the adapters' files.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.lora import LoRARequest
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.worker.models.safetensors_header import read_header
from holdfast.worker.sampling_params import SamplingParams

PROMPT_TOKENS: Final = 8
NUM_LOADS: Final = 12
NUM_STREAMS: Final = 8
STREAM_TOKENS: Final = 1500
"""Of a stream that is cancelled before that."""
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Figures = dict[str, list[float]]


def write_adapter(base: Path, folder: Path, seed: int, rank: int, dtype: torch.dtype) -> LoRARequest:
    """Random matrices of all linears, as PEFT saves them."""
    header, _ = read_header(base / "model.safetensors")
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, entry in header.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS and name != module:
            outputs, inputs = entry["shape"]
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                numbers = torch.randn(shape, generator=draw) * 0.01
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = numbers.to(dtype)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest(folder.name, 1, str(folder))


def engine_of(given: argparse.Namespace, *, serves_adapters: bool) -> InferenceEngine:
    model: dict[str, object] = {"executor": "native", "dtype": "bfloat16"}
    if serves_adapters:
        model |= {"enable_lora": True, "max_loras": max(given.rows) + 2}
    length = PROMPT_TOKENS + given.tokens + 16
    num_blocks = max(4 * max(given.rows) * (length // 16 + 1), NUM_STREAMS * STREAM_TOKENS // 16 + 64)
    cache, parallel = {"num_blocks": num_blocks}, {"num_threads": given.threads}
    settings = {"model": model, "cache": cache, "parallel": parallel}
    return InferenceEngine(str(given.model), settings)


def prompt_of(number: int) -> list[int]:
    """Other tokens for each number: no prefix is found in the cache."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(100, 1000, (PROMPT_TOKENS,), generator=draw).tolist()


class Rounds:
    """Decodes of equal prompts by several programs in turn."""

    def __init__(self, tokens: int) -> None:
        self._params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._number = 0

    def run(self, engine: InferenceEngine, adapters: Sequence[LoRARequest | None]) -> tuple[float, float]:
        """Seconds of CPU time and by the clock, for a row with each of these adapters."""
        prompts = [prompt_of(self._number + row) for row in range(len(adapters))]
        began, began_cpu = time.perf_counter(), time.process_time()
        handles = [
            engine.enqueue_request(prompt, self._params, lora_request=adapter)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        for handle in handles:
            handle.result()
        return time.process_time() - began_cpu, time.perf_counter() - began

    def next_prompts(self, count: int) -> None:
        self._number += count


def decodes(
    plain: InferenceEngine, serving: InferenceEngine, loras: Sequence[LoRARequest], given: argparse.Namespace
) -> dict[str, dict[str, Figures]]:
    """Seconds by rows and program."""
    figures: dict[str, dict[str, Figures]] = {}
    rounds = Rounds(given.tokens)
    for rows in given.rows:
        programs: dict[str, tuple[InferenceEngine, list[LoRARequest | None]]] = {
            "without LoRA": (plain, [None] * rows),
            "no row has an adapter": (serving, [None] * rows),
            "one adapter": (serving, [loras[0]] * rows),
            f"{rows} adapters": (serving, list(loras[:rows])),
        }
        found = figures[str(rows)] = defaultdict(lambda: defaultdict(list))
        for number in range(given.rounds + 1):
            names = list(programs) if number % 2 else list(reversed(programs))
            for name in names:
                cpu_s, clock_s = rounds.run(*programs[name])
                if number:  # the first round loads adapters and makes rooms
                    found[name]["cpu_s"].append(cpu_s)
                    found[name]["clock_s"].append(clock_s)
            rounds.next_prompts(rows)
    return figures


def loads(serving: InferenceEngine, loras: Sequence[LoRARequest]) -> list[float]:
    """Milliseconds of loads by the replica, of adapters that it does not have."""
    found = []
    for lora in loras:
        before = serving.get_stats().num_adapter_loads
        first_token(serving, lora)
        stats = serving.get_stats()
        assert stats.num_adapter_loads == before + 1, "it was loaded"
        found.append(1e3 * stats.adapter_load_s)
    return found


def first_token(serving: InferenceEngine, lora: LoRARequest) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    serving.enqueue_request(prompt_of(0), params, lora_request=lora).result()


def replacements(serving: InferenceEngine, loras: Sequence[LoRARequest]) -> dict[str, list[float]]:
    """Milliseconds of replacements while streams run, and of the longest pauses between steps of the streams: within a
    replacement, and as long as one takes without any.
    """
    times: list[float] = []

    def note(_: RequestOutput) -> None:
        times.append(time.perf_counter())

    num_tokens = min(STREAM_TOKENS, serving.max_sequence_len - PROMPT_TOKENS)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    streams = [serving.enqueue_request(prompt_of(row), params, callback=note) for row in range(NUM_STREAMS)]
    while len(times) < 8 * NUM_STREAMS and not any(stream.future.done() for stream in streams):
        time.sleep(0.05)
    found: dict[str, list[float]] = {"replace": [], "pause": [], "usual pause": []}
    for lora in loras:
        usual = time.perf_counter()
        time.sleep(0.2)
        began = time.perf_counter()
        first_token(serving, LoRARequest("policy", 1, lora.lora_path, load_inplace=True))
        ended = time.perf_counter()
        found["replace"].append(1e3 * (ended - began))
        found["pause"].append(longest_pause(times, began, ended))
        found["usual pause"].append(longest_pause(times, usual, began))
    assert not any(stream.future.done() for stream in streams), "they run as long as adapters are replaced"
    for stream in streams:
        stream.cancel()
    return found


def longest_pause(times: Sequence[float], began: float, ended: float) -> float:
    """The longest time between two tokens of any stream, in milliseconds."""
    some = [began, *(one for one in list(times) if began <= one <= ended), ended]
    return 1e3 * max(after - before for before, after in pairwise(some))


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, given.dtype)
    count = max(max(given.rows), NUM_LOADS)
    loras = [write_adapter(given.model, folder / f"a{seed}", seed, given.rank, dtype) for seed in range(count)]
    fresh = [
        write_adapter(given.model, folder / f"b{seed}", 100 + seed, given.rank, dtype) for seed in range(NUM_LOADS)
    ]
    num_bytes = Path(loras[0].lora_path, "adapter_model.safetensors").stat().st_size
    with engine_of(given, serves_adapters=False) as plain, engine_of(given, serves_adapters=True) as serving:
        found: dict[str, Any] = {"bytes": num_bytes, "decodes": decodes(plain, serving, loras, given)}
        found["load"] = loads(serving, fresh)
        found["replace"] = replacements(serving, loras[:NUM_LOADS])
    return found | {"load_average": os.getloadavg()}


def show(found: dict[str, Any], given: argparse.Namespace) -> None:
    table = Table("rows", "", "tokens/s", "of the base by CPU time", "by the clock")
    for rows, programs in found["decodes"].items():
        base = programs["without LoRA"]
        for name, one in programs.items():
            speed = int(rows) * given.tokens / statistics.median(one["clock_s"])
            shares = [min(base[kind]) / min(one[kind]) for kind in ("cpu_s", "clock_s")]
            table.add_row(rows, name, f"{speed:.0f}", *(f"{share:.3f}" for share in shares))
    console = Console()
    console.print(table)
    console.print(f"an adapter of {found['bytes'] / 1e6:.1f} MB; load {found['load_average'][0]:.1f}")
    for name, times in {"load": found["load"], **found["replace"]}.items():
        console.print(f"{name}: {statistics.median(times):.1f} ms [{min(times):.1f}..{max(times):.1f}]")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        show(measure(given, Path(folder)), given)


if __name__ == "__main__":
    main()
