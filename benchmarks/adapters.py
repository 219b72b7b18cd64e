"""LoRA adapters beside their base model: time of a step with them, and times to load and to replace one.

    python -m benchmarks.adapters MODEL_FOLDER [--parts steps load replace] [--rank 16] [--rows 8 32] [--rounds 12]
        [--in-a-row 3] [--threads N] [--dtype float32] [--json FILE]

MODEL_FOLDER has one file of safetensors whose modules have separate names (`q_proj`, `gate_proj`). Adapters are random,
and lie in a temporary folder, in the page cache; `--dtype` is that of their files.

steps: decodes of all rows, in turn, by the least clock and CPU time, as a share of that of a model without LoRA.
load: adapters that are new, one at a time, in an engine that does nothing else, not even make memory ready.
replace: adapters in place of each other, while streams run: from the call to the first token of the new content, beside
the same request for an adapter that is resident; and the longest pause of a stream. Calls come at any time of a step.
Times are medians by the clock, with the least and the largest. How long a word takes between two cores, before all that
and after it, tells whether they share a cache, which shares of steps depend on.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.core_ping import ping_ns
from benchmarks.decoder_steps import Kind, make_batch
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.lora import LoRARequest
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.worker.adapter import Adapter
from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from holdfast.worker.engine.model_runner import ModelRunner
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.safetensors_header import read_header
from holdfast.worker.sampling_params import SamplingParams

NUM_BEFORE: Final = 160
"""Tokens of each sequence in the cache, of a decode that is measured."""
PROMPT_TOKENS: Final = 8
NUM_LOADS: Final = 10
NUM_REPLACEMENTS: Final = 24
NUM_STREAMS: Final = 8
PAUSE_S: Final = 0.2
LONGEST_STEP_S: Final = 0.05
STREAM_TOKENS: Final = 1500
"""Of a stream that is cancelled before that."""
PARTS: Final = ("steps", "load", "replace")
FEW: Final = ("q_proj", "v_proj")
ALL: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Folders:
    """Random adapters of one model, as PEFT saves them, in a temporary folder."""

    def __init__(self, base: Path, folder: Path, rank: int, dtype: torch.dtype) -> None:
        self._header, _ = read_header(base / "model.safetensors")
        self._folder, self._rank, self._dtype = folder, rank, dtype
        self.num_bytes = 0
        """Size of the last file."""

    def write(self, number: int, targets: Sequence[str] = ALL) -> Adapter:
        """Another adapter for each number."""
        draw, tensors = torch.Generator().manual_seed(number), {}
        for name, entry in self._header.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in targets and name != module:
                outputs, inputs = entry["shape"]
                for part, shape in (("A", (self._rank, inputs)), ("B", (outputs, self._rank))):
                    numbers = torch.randn(shape, generator=draw) * 0.01
                    tensors[f"base_model.model.{module}.lora_{part}.weight"] = numbers.to(self._dtype)
        folder = self._folder / str(number)
        folder.mkdir()
        sizes = {"r": self._rank, "lora_alpha": 2 * self._rank}
        config = {"peft_type": "LORA", **sizes, "target_modules": list(targets), "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")
        self.num_bytes = (folder / "adapter_model.safetensors").stat().st_size
        return Adapter.in_folder(f"a{number}", str(folder))


# --- steps ---


@dataclass(slots=True)
class Case:
    """Rows of one decode, and the slots of their adapters; 0: none."""

    name: str
    slots: Sequence[int]
    runner: ModelRunner
    times_s: list[tuple[float, float]] = field(default_factory=list)
    """By the clock, and of the CPU."""

    def batch(self) -> StepBatch:
        batch = make_batch(Kind(self.name, len(self.slots), NUM_BEFORE, 1), self.runner.info.block_size)
        return replace(batch, adapter_slots=np.array(self.slots, dtype=np.int64)) if any(self.slots) else batch

    @property
    def least_s(self) -> tuple[float, float]:
        clock_s, cpu_s = zip(*self.times_s, strict=True)
        return min(clock_s), min(cpu_s)


def runner_of(given: argparse.Namespace, max_loras: int) -> ModelRunner:
    """The model without LoRA, or with slots for this number of adapters."""
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": max_loras} if max_loras else {}
    config = WorkerConfig(
        model=ModelConfig(model=str(given.model), executor="native", dtype="bfloat16", **lora),
        cache=CacheConfig(kv_cache_memory=1 << 30),
        parallel=ParallelConfig(num_threads=given.threads),
    )
    return ModelRunner.load(config, SingleRank(), device=torch.device("cpu"))


def cases(given: argparse.Namespace, folders: Folders) -> list[Case]:
    """The first slots have adapters of all linears, the others of few."""
    most, few = max(given.rows), min(given.rows)
    plain, serving = runner_of(given, 0), runner_of(given, most + few)
    assert serving.adapters is not None
    for slot in range(1, most + few + 1):
        serving.adapters.fetch(slot, folders.write(slot, ALL if slot <= most else FEW))
        if (failure := serving.adapters.take(slot, slot)) is not None:
            raise failure
    found = [Case(f"{few}, with {few} adapters of {' and '.join(FEW)}", range(most + 1, most + few + 1), serving)]
    for rows in given.rows:
        found += [
            Case(f"{rows}, without LoRA", [0] * rows, plain),
            Case(f"{rows}, none has an adapter", [0] * rows, serving),
            Case(f"{rows}, with one adapter of all linears", [1] * rows, serving),
            Case(f"{rows}, with {rows} adapters of all linears", range(1, rows + 1), serving),
        ]
        if rows > few:
            slots = [row % few + 1 for row in range(rows)]
            found.append(Case(f"{rows}, with {few} adapters of all linears", slots, serving))
    return found


def measure_steps(given: argparse.Namespace, folders: Folders) -> list[Case]:
    """Steps of all cases in turn, another case the first in each round."""
    measured = cases(given, folders)
    batches = {case.name: case.batch() for case in measured}
    for number in range(given.rounds):
        first = number % len(measured)
        for case in (*measured[first:], *measured[:first]):
            for _ in range(given.in_a_row):
                began = time.perf_counter(), time.process_time()
                case.runner.backend.run(batches[case.name], with_logits=False)
                case.times_s.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return measured


def show_steps(measured: Sequence[Case], console: Console) -> None:
    table = Table("rows", "tokens/s", "share by the clock", "by CPU time")
    plain = {len(case.slots): case.least_s for case in measured if case.name.endswith("without LoRA")}
    for case in measured:
        shares = (whole / own for whole, own in zip(plain[len(case.slots)], case.least_s, strict=True))
        table.add_row(case.name, f"{len(case.slots) / case.least_s[0]:.0f}", *(f"{share:.2f}" for share in shares))
    console.print(table)


# --- loads and replacements ---


def engine_of(given: argparse.Namespace) -> InferenceEngine:
    model: dict[str, object] = {"executor": "native", "dtype": "bfloat16", "enable_lora": True, "max_loras": NUM_LOADS}
    cache = {"num_blocks": NUM_STREAMS * STREAM_TOKENS // 16 + 64}
    return InferenceEngine(
        str(given.model), {"model": model, "cache": cache, "parallel": {"num_threads": given.threads}}
    )


def prompt_of(number: int) -> list[int]:
    """Other tokens for each number: no prefix is found in the cache."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(100, 1000, (PROMPT_TOKENS,), generator=draw).tolist()


def params_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


class Times:
    """Milliseconds by what took them."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.found: dict[str, list[float]] = {}
        self._engine = engine
        self._number = 0

    def note(self, name: str, duration_s: float) -> None:
        self.found.setdefault(name, []).append(1e3 * duration_s)

    def first_token(self, name: str, lora: LoRARequest) -> None:
        """Notes the time from the call to the first token."""
        self._number += 1
        prompt, began_s = prompt_of(1000 + self._number), time.perf_counter()
        self._engine.enqueue_request(prompt, params_of(1), lora_request=lora).result()
        self.note(name, time.perf_counter() - began_s)


def loads(engine: InferenceEngine, adapters: Sequence[Adapter], times: Times) -> None:
    """Adapters that the replica does not have."""
    for adapter in adapters:
        time.sleep(PAUSE_S)
        before = engine.get_stats().num_adapter_loads
        times.first_token("first token of one that is new", LoRARequest(adapter.name, 1, adapter.path))
        stats = engine.get_stats()
        assert stats.num_adapter_loads == before + 1, "it was loaded"
        times.note("load, by the replica", stats.adapter_load_s)
        times.first_token("first token of one that is resident", LoRARequest(adapter.name, 1, adapter.path))


def replacements(engine: InferenceEngine, adapters: Sequence[Adapter], times: Times) -> None:
    """Replacements while streams run with the first of the adapters."""
    tokens_s: list[float] = []

    def note(_: RequestOutput) -> None:
        tokens_s.append(time.perf_counter())

    policy, draw = LoRARequest("policy", 1, adapters[0].path), random.Random(0)
    num_tokens = min(STREAM_TOKENS, engine.max_sequence_len - PROMPT_TOKENS)
    streams = [
        engine.enqueue_request(prompt_of(row), params_of(num_tokens), callback=note, lora_request=policy)
        for row in range(NUM_STREAMS)
    ]
    while len(tokens_s) < 8 * NUM_STREAMS and not any(stream.future.done() for stream in streams):
        time.sleep(0.05)
    for adapter in adapters[1:]:
        began_s = time.perf_counter()
        time.sleep(PAUSE_S + draw.uniform(0, LONGEST_STEP_S))
        times.first_token("under streams, first token of one that is resident", policy)
        middle_s = time.perf_counter()
        time.sleep(PAUSE_S + draw.uniform(0, LONGEST_STEP_S))
        times.first_token(
            "under streams, first token of one that replaces another",
            policy := LoRARequest("policy", 1, adapter.path, load_inplace=True),
        )
        times.note("longest pause of a stream", longest_pause_s(tokens_s, middle_s, time.perf_counter()))
        times.note("longest pause without a replacement", longest_pause_s(tokens_s, began_s, middle_s))
        policy = replace(policy, load_inplace=False)
    assert not any(stream.future.done() for stream in streams), "they run as long as adapters are replaced"
    for stream in streams:
        stream.cancel()


def longest_pause_s(times_s: Sequence[float], began_s: float, ended_s: float) -> float:
    """The longest time between two tokens of any stream."""
    some = [began_s, *(one for one in list(times_s) if began_s <= one <= ended_s), ended_s]
    return max(after - before for before, after in pairwise(some))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--parts", nargs="+", choices=("steps", "load", "replace"), default=["steps", "load", "replace"]
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--in-a-row", type=int, default=3, help="steps of a case that follow each other, as in serving")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console = Console()
    found: dict[str, Sequence[object]] = {}
    pings_ns = [ping_ns()]
    with tempfile.TemporaryDirectory() as folder:
        folders = Folders(given.model, Path(folder), given.rank, getattr(torch, given.dtype))
        if "steps" in given.parts:
            measured = measure_steps(given, folders)
            show_steps(measured, console)
            found = {case.name: case.times_s for case in measured}
            del measured
        if {"load", "replace"} & set(given.parts):
            with engine_of(given) as engine:
                times = Times(engine)
                for part, measure, count in (
                    ("load", loads, NUM_LOADS),
                    ("replace", replacements, NUM_REPLACEMENTS + 1),
                ):
                    if part in given.parts:
                        first = 1000 * len(part)
                        measure(engine, [folders.write(first + number) for number in range(count)], times)
                found |= times.found
            for name, some in times.found.items():
                console.print(f"{name}: {statistics.median(some):.1f} ms [{min(some):.1f}..{max(some):.1f}]")
    found["ping, ns"] = [*pings_ns, ping_ns()]
    before, after = ("-" if ns is None else f"{ns:.0f} ns" for ns in found["ping, ns"])
    console.print(f"from one core to another: {before} before, {after} after")
    console.print(f"an adapter of {folders.num_bytes / 1e6:.1f} MB; load {os.getloadavg()[0]:.1f}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
