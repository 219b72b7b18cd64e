"""Times of single steps of a native backend, and of the HF backend beside it, in one run.

    python -m benchmarks.decoder_steps MODEL [--dtype bfloat16] [--threads 2] [--rounds 30] [--hf-backend] [--one-slice]
        [--in-a-row 1] [--whole-weights] [--int8-cache] [--against LIBRARY] [--json FILE]

Steps of six kinds: decodes of 1, 8 and 32 sequences, of 1 and 8 in a long context, a prompt. `--one-slice`: beside it
the program without slices of row-parallel sums; `--whole-weights`: with weights that are not compact; `--int8-cache`:
with keys and values in int8; `--against`: with another version of the native library. Rounds of the kinds and of the
programs alternate, each program being the first in some, so that all see the same company on the machine; the table has
medians, the fastest tenth, and the least CPU time of all threads. What a step costs outside the program (planning,
delivering) is not in it.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.worker.config import CacheConfig, KVCacheDtype, ModelConfig, WorkerConfig
from holdfast.worker.executors.cpu import executor, library
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models import rank_share
from holdfast.worker.models.loading import LoadedModel, load_model


@dataclass(frozen=True, slots=True)
class Kind:
    """Equal sequences, each with `num_tokens` to compute after `num_before` that are in the cache."""

    name: str
    num_sequences: int
    num_before: int
    num_tokens: int


KINDS = (
    Kind("decode 1", 1, 160, 1),
    Kind("decode 8", 8, 160, 1),
    Kind("decode 32", 32, 160, 1),
    Kind("decode 1 after 1000", 1, 1000, 1),
    Kind("decode 8 after 1040", 8, 1040, 1),
    Kind("prompt of 512", 1, 0, 512),
)


@dataclass(slots=True)
class Timed:
    """One program, with the seconds of its steps by kind."""

    name: str
    loaded: LoadedModel
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)

    def step(self, kind: Kind) -> None:
        batch = make_batch(kind, self.loaded.info.block_size)
        started, cpu = time.perf_counter(), time.process_time()
        self.loaded.backend.run(batch, with_logits=False)
        self.cpu_seconds.setdefault(kind.name, []).append(time.process_time() - cpu)
        self.seconds.setdefault(kind.name, []).append(time.perf_counter() - started)


def make_batch(kind: Kind, block_size: int) -> StepBatch:
    """A step of this kind, greedy, in blocks of its own."""
    count, each = kind.num_sequences, kind.num_tokens
    num_blocks = -(-(kind.num_before + each) // block_size)
    return StepBatch(
        step_id=0,
        token_ids=np.arange(count * each) % 500 + 3,
        first_positions=np.full(count, kind.num_before),
        num_tokens=np.full(count, each),
        num_draws=np.ones(count, dtype=np.int64),
        block_ids=np.arange(count * num_blocks),
        num_blocks=np.full(count, num_blocks),
        block_copies=np.zeros((3, 0), dtype=np.int64),
        logits_rows=np.arange(1, count + 1) * each - 1,
    )


def load(
    name: str,
    model: str,
    runs_on: str = "native",
    dtype: str = "bfloat16",
    *,
    inputs: str = "auto",
    kept_as: KVCacheDtype = "auto",
) -> Timed:
    settings = {
        "model": model,
        "executor": runs_on,
        "dtype": dtype,
        "quantized_activations": inputs,
    }
    config = WorkerConfig(
        model=ModelConfig.model_validate(settings),
        cache=CacheConfig(kv_cache_memory=1 << 30, kv_cache_dtype=kept_as),
    )
    loaded = load_model(located(config), SingleRank(), torch.device("cpu"), lambda phase, done, total: None)
    loaded.cache.clear(torch.arange(most_blocks(loaded.cache.block_size)))  # has memory of its own from here on
    return Timed(name, loaded)


def most_blocks(block_size: int) -> int:
    """Blocks of the kind that takes most of them."""
    return max(len(make_batch(kind, block_size).block_ids) for kind in KINDS)


def load_one_slice(model: str, dtype: str) -> Timed:
    """The native backend, its row-parallel sums in one piece."""
    with patch.object(rank_share.RankShare, "slices", lambda self, length: 1):
        return load("one slice", model, dtype=dtype)


def load_whole(model: str, dtype: str) -> Timed:
    """The native backend, its weights of bfloat16 as they are."""
    with patch.object(executor, "kept_forms", lambda name, compacts: library.kept_forms(name, False)):
        return load("whole weights", model, dtype=dtype)


def load_against(model: str, dtype: str, other: Path) -> Timed:
    """The native backend on another library, which is loaded as it is, whatever sources it was made from."""
    library.load_library.cache_clear()
    with patch.object(library, "path_of", lambda name: other):
        timed = load("against", model, dtype=dtype)
    library.load_library.cache_clear()
    return timed


def show(programs: list[Timed], console: Console) -> None:
    table = Table("step", *(f"{one.name}, {what} ms" for one in programs for what in ("median", "p10", "CPU")))
    for kind in KINDS:
        cells = []
        for one in programs:
            seconds = sorted(one.seconds[kind.name])
            cells += [f"{statistics.median(seconds) * 1e3:.2f}", f"{seconds[len(seconds) // 10] * 1e3:.2f}"]
            cells.append(f"{min(one.cpu_seconds[kind.name]) * 1e3:.2f}")
        table.add_row(kind.name, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--in-a-row", type=int, default=1, help="steps of one kind that follow each other, as in serving"
    )
    parser.add_argument("--hf-backend", action="store_true", help="time the HF backend as well")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--int8-activations", action="store_true", help="time quantized weights in int8 as well")
    parser.add_argument("--one-slice", action="store_true", help="time row-parallel sums in one piece as well")
    parser.add_argument("--whole-weights", action="store_true", help="time weights that are not compact as well")
    parser.add_argument("--int8-cache", action="store_true", help="time keys and values in int8 as well")
    parser.add_argument("--against", type=Path, help="a library of the same instruction class, to time as well")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, dtype = arguments.model, arguments.dtype
    programs = [load("native", model, dtype=dtype)]
    if arguments.hf_backend:
        programs.append(load("hf", model, "hf", dtype))
    if arguments.int8_activations:
        programs.append(load("int8", model, dtype=dtype, inputs="int8"))
    if arguments.one_slice:
        programs.append(load_one_slice(model, dtype))
    if arguments.whole_weights:
        programs.append(load_whole(model, dtype))
    if arguments.int8_cache:
        programs.append(load("int8 cache", model, dtype=dtype, kept_as="int8"))
    if arguments.against:
        programs.append(load_against(model, dtype, arguments.against))
    for number in range(arguments.rounds):
        first = number % len(programs)
        for kind in KINDS:
            for one in (*programs[first:], *programs[:first]):
                for _ in range(arguments.in_a_row):
                    one.step(kind)
    console = Console()
    console.print(f"{arguments.model}, {arguments.threads} threads, {platform.processor() or platform.machine()}")
    show(programs, console)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({one.name: {"wall": one.seconds, "cpu": one.cpu_seconds} for one in programs}, indent=1)
        )


if __name__ == "__main__":
    main()
