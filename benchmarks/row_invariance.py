"""Benchmark of row-invariant arithmetic: whole steps with it and with the plain kernels, in turns, in one run.

    python -m benchmarks.row_invariance [--model demo | --model 0.5b | --model FOLDER] [--dtype auto] [--rounds 20]

Plain means: `F.linear` on all rows at once, and `scaled_dot_product_attention` on each sequence's exact length. Both
sides run the same Hugging Face code, cache and sampler. `0.5b` is the shape of a 0.5 B model (hidden 896, 24 layers, 14
heads, 2 KV heads) with random weights. Printed: milliseconds per step, and their ratio (below 1: we are faster).
"""

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.distributed.tensor_parallel import SingleRank
from holdfast.worker.draws import DrawParams
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.kv_cache import KVCache, LayerCache
from holdfast.worker.models import hf_backend
from holdfast.worker.models.hf_backend import HfCpuBackend
from holdfast.worker.models.hf_steps import PagedAttention
from holdfast.worker.models.linear import Kernel
from holdfast.worker.models.memory import kv_bytes_per_token
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.parallelize import Target
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.replica.rank import default_device, prepare_process
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_plan import ScheduledSequence, StepPlan

BLOCK_SIZE, MAX_LEN = 16, 512
GREEDY = DrawParams(SamplingParams(seed=0, temperature=0.0), 0)
HALF_BILLION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


class PlainAttention:
    """Each sequence by itself, on its exact length."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._sequences: list[tuple[int, int, Tensor, int, Tensor]] = []

    def begin(self, batch: StepBatch) -> None:
        positions, sequences = batch.positions, np.repeat(np.arange(len(batch.num_tokens)), batch.num_tokens)
        blocks = batch.blocks_of(sequences, positions // self._block_size)
        self._slots = torch.from_numpy(blocks * self._block_size + positions % self._block_size)
        self._sequences, row, block = [], 0, 0
        for first, count, blocks in zip(batch.first_positions, batch.num_tokens, batch.num_blocks, strict=True):
            end = int(first + count)
            mask = torch.arange(end)[None] <= torch.arange(int(first), end)[:, None]
            table = torch.from_numpy(batch.block_ids[block : block + blocks])
            self._sequences.append((row, int(count), table, end, mask))
            row, block = row + int(count), block + int(blocks)

    def attend(
        self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        for pool, new in ((layer.keys, key), (layer.values, value)):
            pool.flatten(0, 1).index_copy_(0, self._slots, new.transpose(0, 1))
        outputs = []
        for row, count, table, end, mask in self._sequences:
            keys = layer.keys.index_select(0, table).flatten(0, 1)[:end].transpose(0, 1)[None]
            values = layer.values.index_select(0, table).flatten(0, 1)[:end].transpose(0, 1)[None]
            queries = query[None, :, row : row + count]
            output = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)


class PlainSteps:
    """Steps over one cache, whose attention modules call `attention`."""

    numerics = "plain"

    def __init__(self, model: RankModel, cache: KVCache, attention: PlainAttention) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention

    def run(self, batch: StepBatch) -> Tensor:
        if batch.block_copies.size:
            self._cache.copy(*torch.from_numpy(batch.block_copies))
        self._attention.begin(batch)
        return self._model(batch).float()

    def warm_up(self, max_rows: int) -> None:
        pass

    def close(self) -> None:
        pass


class PlainBackend:
    """torch's kernels as they come."""

    def __init__(self, model: RankModel, target: Target) -> None:
        self._model = model
        self._target = target

    def linear(self, weight: Tensor, bias: Tensor | None, num_slices: int = 1, *, is_part: bool = False) -> Kernel:
        return partial(F.linear, weight=weight, bias=bias)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self._model.specs, self._target.dtype)

    def make_sampler(self) -> NativeSampler:
        return NativeSampler.with_threads(torch.get_num_threads())

    def warm_up_sampler(self, max_rows: int) -> None:
        pass

    def allocate(self, num_blocks: int, block_size: int, progress: ProgressCounter) -> tuple[KVCache, PlainSteps]:
        specs = self._model.specs
        cache = KVCache.allocate(specs, num_blocks, block_size, self._target.dtype, "cpu")
        attention = PlainAttention(block_size)
        self._model.attach(
            lambda layer: PagedAttention(specs[layer], partial(attention.attend, cache.layers[layer]), progress)
        )
        return cache, PlainSteps(self._model, cache, attention)


def load(config: WorkerConfig, *, plain: bool) -> LeaderRunner:
    """A replica of one rank, with our kernels or with plain ones."""
    group, device = SingleRank(), default_device(config, rank=0)
    prepare_process(config, device)
    with patch.object(hf_backend, "HfCpuBackend", PlainBackend if plain else HfCpuBackend):
        return LeaderRunner(ModelRunner.load(config, group, device=device), group)


def step(num_sequences: int, num_tokens: int, first_position: int) -> StepPlan:
    """Each of the sequences runs `num_tokens` from `first_position` on, and draws one."""
    per_sequence = MAX_LEN // BLOCK_SIZE
    num_blocks = -(-(first_position + num_tokens) // BLOCK_SIZE)
    return StepPlan(
        step_id=1,
        others=tuple(
            ScheduledSequence(
                sequence_id=i,
                first_position=first_position,
                token_ids=tuple(range(5, 5 + num_tokens)),
                block_ids=tuple(range(i * per_sequence, i * per_sequence + num_blocks)),
                draw=GREEDY,
                num_draws=1,
            )
            for i in range(num_sequences)
        ),
    )


STEPS = {
    "decode, 1 sequence at 200": step(1, 1, 200),
    "decode, 4 sequences at 200": step(4, 1, 200),
    "decode, 16 sequences at 200": step(16, 1, 200),
    "prompt of 64 tokens": step(1, 64, 0),
    "prompt of 256 tokens": step(1, 256, 0),
}


def time_ms(runner: LeaderRunner, plan: StepPlan) -> float:
    started_s = time.perf_counter()
    runner.run(plan)
    return 1000 * (time.perf_counter() - started_s)


def compare(ours: LeaderRunner, plain: LeaderRunner, num_rounds: int) -> Table:
    table = Table("step", "row-invariant", "plain", "ratio")
    for name, plan in STEPS.items():
        pairs = [(time_ms(ours, plan), time_ms(plain, plan)) for _ in range(num_rounds + 3)][3:]
        ours_ms, plain_ms = (statistics.median(side) for side in zip(*pairs, strict=True))
        table.add_row(name, f"{ours_ms:.1f} ms", f"{plain_ms:.1f} ms", f"{ours_ms / plain_ms:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, 0.5b, or a local folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, load_format = arguments.model, "auto"
        if arguments.model == "demo":
            folder = str(bundled_path("demo"))
        elif arguments.model == "0.5b":
            (Path(scratch) / "config.json").write_text(json.dumps(HALF_BILLION))
            folder, load_format = scratch, "dummy"
        model = ModelConfig(
            model=folder, executor="hf", dtype=arguments.dtype, load_format=load_format, max_model_len=MAX_LEN
        )
        config = WorkerConfig(model=model, cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=16 * 32))
        ours, plain = load(config, plain=False), load(config, plain=True)
        info = ours._runner.info
        console = Console()
        threads = torch.get_num_threads()
        console.print(f"{arguments.model} ({info.dtype}), {threads} threads, row-invariant: {info.row_invariant}")
        console.print(compare(ours, plain, arguments.rounds))


if __name__ == "__main__":
    main()
