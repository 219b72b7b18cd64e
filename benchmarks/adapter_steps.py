"""Steps with LoRA adapters beside steps without, in one run: CPU time of decodes, in turn.

    python -m benchmarks.adapter_steps MODEL [--rank 16] [--rounds 12] [--in-a-row 3] [--threads 1] [--json FILE]

MODEL is a folder with safetensors whose modules have their own names (`q_proj`, `gate_proj`). Adapters are random, and
lie in a temporary folder. Printed is the least CPU time of a step, and that of the same step without adapters as a
share of it.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.decoder_steps import Kind, make_batch
from holdfast.worker.adapter import Adapter
from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.distributed.tensor_parallel import SingleRank
from holdfast.worker.engine.model_runner import ModelRunner

NUM_ADAPTERS: Final = 8
"""Adapters of few linears, and as many of all."""
NUM_BEFORE: Final = 160
"""Tokens of each sequence in the cache."""
FEW: Final = ("q_proj", "v_proj")
ALL: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(slots=True)
class Case:
    """Rows of one decode, and the slots of their adapters; 0: none."""

    name: str
    slots: Sequence[int]
    cpu_s: list[float] = field(default_factory=list)

    def batch(self, block_size: int) -> StepBatch:
        batch = make_batch(Kind(self.name, len(self.slots), NUM_BEFORE, 1), block_size)
        return replace(batch, adapter_slots=np.array(self.slots, dtype=np.int64)) if any(self.slots) else batch


def cases() -> list[Case]:
    """The first half of the slots has adapters of few linears, the second half of all."""
    few, every = range(1, NUM_ADAPTERS + 1), range(NUM_ADAPTERS + 1, 2 * NUM_ADAPTERS + 1)
    return [
        Case("8, none", [0] * 8),
        Case("8, with 8 adapters of q_proj and v_proj", [*few]),
        Case("8, with 8 adapters of all linears", [*every]),
        Case("8, with one adapter of all linears", [every[0]] * 8),
        Case("32, none", [0] * 32),
        Case("32, with 8 adapters of all linears", [*every] * 4),
        Case("32, with one adapter of all linears", [every[0]] * 32),
    ]


def save_adapter(model: Path, folder: Path, targets: Sequence[str], rank: int, seed: int) -> Adapter:
    """A random adapter of the model's linears with these names, as PEFT writes it."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no mapping
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and module.rpartition(".")[2] in targets:
                    outputs, inputs = weights.get_slice(name).get_shape()
                    a, b = (
                        torch.randn(rank, inputs, generator=generator),
                        torch.randn(outputs, rank, generator=generator),
                    )
                    tensors |= {f"base_model.model.{module}.lora_{part}.weight": t for part, t in (("A", a), ("B", b))}
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.01, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return Adapter.in_folder(folder.name, str(folder))


def load(model: Path, rank: int, folder: Path) -> ModelRunner:
    """The model with adapters in all slots that the cases name."""
    config = WorkerConfig(
        model=ModelConfig(model=str(model), dtype="bfloat16", enable_lora=True, max_loras=2 * NUM_ADAPTERS),
        cache=CacheConfig(kv_cache_memory=1 << 30),
    )
    runner = ModelRunner.load(config, SingleRank(), device=torch.device("cpu"))
    assert runner.adapters is not None
    for slot in range(1, 2 * NUM_ADAPTERS + 1):
        targets = FEW if slot <= NUM_ADAPTERS else ALL
        adapter = save_adapter(model, folder / f"adapter-{slot}", targets, rank, seed=slot)
        runner.adapters.fetch(slot, adapter)
        if (failure := runner.adapters.take(slot, slot)) is not None:
            raise failure
    return runner


def measure(runner: ModelRunner, measured: Sequence[Case], rounds: int, in_a_row: int) -> None:
    """Steps of all cases in turn, another case the first in each round."""
    batches = {case.name: case.batch(runner.info.block_size) for case in measured}
    for number in range(rounds):
        first = number % len(measured)
        for case in (*measured[first:], *measured[:first]):
            for _ in range(in_a_row):
                began_s = time.process_time()
                runner.backend.run(batches[case.name], with_logits=False)
                case.cpu_s.append(time.process_time() - began_s)


def show(measured: Sequence[Case]) -> None:
    table = Table("rows", "CPU ms", "share")
    plain = {len(case.slots): min(case.cpu_s) for case in measured if not any(case.slots)}
    for case in measured:
        least = min(case.cpu_s)
        table.add_row(case.name, f"{least * 1e3:.2f}", f"{plain[len(case.slots)] / least:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--in-a-row", type=int, default=3, help="steps of one case that follow each other, as in serving"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measured = cases()
    with tempfile.TemporaryDirectory() as folder:
        runner = load(arguments.model, arguments.rank, Path(folder))
        measure(runner, measured, arguments.rounds, arguments.in_a_row)
    show(measured)
    if arguments.json:
        arguments.json.write_text(json.dumps({case.name: case.cpu_s for case in measured}, indent=1))


if __name__ == "__main__":
    main()
