"""Sensitivity of a serving replica's self-check: single bits of weights are flipped, and the question is asked.

    python -m benchmarks.self_check [--flips 16] [--seed 0]

The bundled model, one rank. Each flip is of one bit of one weight of a random linear layer, and is undone before the
next. Printed: for each bit of a weight, how many flips changed the answer. Counts, so any machine will do.
"""

import argparse
import logging
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.products import PackedProduct
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.hf_backend import HfBackend
from holdfast.worker.models.linear import Linear
from holdfast.worker.replica.known_answer import KnownAnswerCheck
from holdfast.worker.replica.rank import prepare_process
from holdfast.worker.scheduler.scheduler import Scheduler

BITS = {15: "sign", **{bit: f"exponent {bit - 7}" for bit in range(14, 6, -1)}}
"""Of bfloat16; the others are the mantissa's."""


class Suspect:
    """A model whose weights can be flipped, and the question that it is asked before and after."""

    def __init__(self, model: str) -> None:
        self._config = WorkerConfig(
            model=ModelConfig(model=model, device="cpu", dtype="bfloat16", executor="hf"),
            cache=CacheConfig(num_blocks=128),
        )
        device = torch.device("cpu")
        prepare_process(self._config, device)
        self._runner = ModelRunner.load(self._config, SingleRank(), device=device)
        self._checkpoint = load_file(f"{model}/model.safetensors")
        program = self._runner.backend
        assert isinstance(program, HfBackend)
        self._pool = NativePool(torch.get_num_threads())
        modules: Any = program.model.module
        self._layers = [
            (f"{name}.weight", module)
            for name, module in modules.named_modules()
            if isinstance(module, Linear) and f"{name}.weight" in self._checkpoint
        ]

    def is_found_out(self, change: AbstractContextManager[None]) -> bool:
        """Whether the answer with the change is another than before it, or there is none: logits may be non-finite."""
        wrong: list[HoldfastError] = []
        engine = self._engine()
        known_answer_check = KnownAnswerCheck(engine, self._runner.info, wrong.append, every_s=0)
        known_answer_check.begin()
        with change:
            known_answer_check.ask()
            try:
                while not wrong and not known_answer_check.num_right:
                    engine.stats()
            except ReplicaError as failure:
                wrong.append(failure)
        engine.stop()
        return bool(wrong)

    @contextmanager
    def flipped(self, mask: int, rng: random.Random) -> Iterator[None]:
        """These bits of one weight, chosen at random, for as long as this lasts. With none, the layer is but remade."""
        name, layer = rng.choice(self._layers)
        weight = self._checkpoint[name].clone()
        index = rng.randrange(weight.numel())
        weight.view(-1)[index : index + 1].view(torch.int16).bitwise_xor_(mask)
        kernel = layer._kernel
        layer._kernel = PackedProduct(self._pool, weight, None)
        yield
        layer._kernel = kernel

    def _engine(self) -> Engine:
        info = self._runner.info
        scheduler = Scheduler(
            self._config.scheduler,
            num_blocks=info.num_blocks,
            window=info.window,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
        )
        engine = Engine(scheduler, LeaderRunner(self._runner, SingleRank()))
        engine.start()
        return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=16, help="of each bit")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    suspect, rng = Suspect(str(bundled_path("demo"))), random.Random(arguments.seed)
    logging.disable()  # an engine whose logits are not finite says so at length
    assert not suspect.is_found_out(suspect.flipped(0, rng)), "nothing has been flipped"
    table = Table("bit", "", "flips", "found")
    total = 0
    for bit in range(15, -1, -1):
        found = 0
        for _ in range(arguments.flips):
            found += suspect.is_found_out(suspect.flipped(1 << bit if bit < 15 else -(1 << 15), rng))
        total += found
        table.add_row(str(bit), BITS.get(bit, "mantissa"), str(arguments.flips), str(found))
    assert not suspect.is_found_out(suspect.flipped(0, rng)), "everything has been put back"
    Console().print(table, f"found: {total} of {16 * arguments.flips}")


if __name__ == "__main__":
    main()
