"""Benchmark of recurrences: what states cost in memory traffic and in prompts, in one run.

    python -m benchmarks.recurrences [--rounds 15] [--class avx512bf16] [--models "NAME;NAME"] [--layers 3]

Layers have the heads of real models. `kernel`: one token of each of 32 sequences through all states, compiled from
`recurrences.cpp` around the executor's own kernel, as often as a pass in place over the same states, `x *= c`; asked is
at most 1.3 of it. `step`: a whole step of those decodes in layers with a hidden size of 64, convolution, gates and
narrow products included. `prompt`: 256 tokens through the same narrow layers, of the time of layers of the real hidden
and MLP sizes: an upper bound of the recurrence's share, asked at most 10 %. One thread, CPU time, the least of the
rounds. A prefix that is found beside one that is computed: `benchmarks.prefix_hits`.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from holdfast.worker.executors.cpu.build import CLASSES, SOURCES, find_compiler
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.cpu.library import runnable_classes
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.loading import load_model
from holdfast.worker.models.native_backend import NativeBackend

SOURCE: Final = Path(__file__).with_suffix(".cpp")
TIMEOUT_S: Final = 300
NUM_DECODES: Final = 32
PROMPT: Final = 256
_NARROW: Final = {"hidden_size": 64, "intermediate_size": 64, "shared_intermediate_size": 64}
_LINEAR: Final = "linear_attention"
_QWEN: Final = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3584,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3.5-0.8B": _QWEN,
    "Qwen3.5-4B": {**_QWEN, "linear_num_value_heads": 32, "hidden_size": 2560, "intermediate_size": 9216},
    "Kimi Linear": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_local_experts": 4,
        "hidden_size": 2304,
        "intermediate_size": 9216,
    },
    "Granite 4 H micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
    },
}


@dataclass(slots=True)
class Layers:
    """Layers that all keep a state, with random weights in bfloat16, and slots for 32 sequences."""

    executor: CpuExecutor

    @classmethod
    def made(cls, values: dict[str, Any], num_layers: int, threads: int) -> "Layers":
        """Layers of a model of these config entries."""
        with tempfile.TemporaryDirectory() as folder:
            kinds = {"layer_types": [_LINEAR] * num_layers, "mlp_layer_types": ["dense"] * num_layers}
            sizes = {"vocab_size": 512, "max_position_embeddings": 4096, "num_hidden_layers": num_layers, **kinds}
            Path(folder, "config.json").write_text(json.dumps({"dtype": "bfloat16", **values, **sizes}))
            worker = WorkerConfig(
                model=ModelConfig(model=folder, load_format="dummy", device="cpu"),
                parallel=ParallelConfig(num_threads=threads),
                cache=CacheConfig(num_blocks=64, num_state_slots=NUM_DECODES),
            )
            backend = load_model(worker, SingleRank(), torch.device("cpu"), lambda phase, done, total: None).backend
        assert isinstance(backend, NativeBackend)
        assert isinstance(backend.executor, CpuExecutor)
        return cls(backend.executor)

    def decode(self, position: int) -> None:
        """A token of each of 32 sequences."""
        self._step(NUM_DECODES, position, 1)

    def read_prompt(self, _: int = 0) -> None:
        """A prompt of 256 tokens."""
        self._step(1, 0, PROMPT)

    def _step(self, count: int, first: int, each: int) -> None:
        rows = np.arange(count)
        batch = StepBatch(
            step_id=0,
            token_ids=np.arange(count * each) % 500 + 3,
            first_positions=np.full(count, first),
            num_tokens=np.full(count, each),
            num_draws=np.ones(count, dtype=np.int64),
            block_ids=rows,
            num_blocks=np.ones(count, dtype=np.int64),
            block_copies=np.zeros((3, 0), dtype=np.int64),
            logits_rows=(rows + 1) * each - 1,
            state_slots=rows,
            num_drafts=np.zeros(count, dtype=np.int64),
        )
        self.executor.run(batch, with_logits=False)


@dataclass(frozen=True, slots=True)
class Heads:
    """States of a layer, and the rule of their recurrence as `recurrences.cpp` numbers it."""

    keys: int
    values: int
    count: int
    rule: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Heads":
        """The heads of a config in `MODELS`."""
        if "mamba_n_heads" in config:
            return cls(config["mamba_d_state"], config["mamba_d_head"], config["mamba_n_heads"], 2)
        if "linear_num_heads" in config:
            return cls(config["linear_head_dim"], config["linear_head_dim"], config["linear_num_heads"], 1)
        return cls(config["linear_key_head_dim"], config["linear_value_head_dim"], config["linear_num_value_heads"], 0)


def compiled(folder: Path, name: str) -> Path:
    """The program around the kernel, with the flags of an instruction class."""
    program = folder / "recurrences"
    flags = ("-std=c++17", "-O2", "-ffp-contract=off", f"-I{SOURCES}", *CLASSES[name])
    subprocess.run([*find_compiler(), *flags, str(SOURCE), "-o", str(program)], check=True)
    return program


def kernel_seconds(program: Path, heads: Heads, num_layers: int, rounds: int) -> tuple[float, float]:
    """Least seconds of the kernel's pass over all states, and of a pass in place."""
    words = [str(value) for value in (heads.keys, heads.values, heads.count, num_layers, heads.rule, rounds)]
    done = subprocess.run([program, *words], check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    kernel, plain = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    return min(kernel) / 1e9, min(plain) / 1e9


def least_seconds(work: Callable[[int], None], rounds: int) -> float:
    """The least CPU time of rounds, which are given their numbers."""
    times = []
    for number in range(rounds):
        began_s = time.process_time()
        work(number)
        times.append(time.process_time() - began_s)
    return min(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--class", dest="name", choices=CLASSES, default=runnable_classes()[0])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--models", default=";".join(MODELS), help="names, with semicolons between them")
    arguments = parser.parse_args()
    num_layers, rounds = arguments.layers, arguments.rounds
    table = Table("heads of", "in place, ms", "kernel, ms", "kernel / in place", "step, ms", "of a prompt")
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder), arguments.name)
        for name in arguments.models.split(";"):
            values = MODELS[name]
            kernel, plain = kernel_seconds(program, Heads.of(values), num_layers, rounds)
            narrow, real = (Layers.made(each, num_layers, 1) for each in ({**values, **_NARROW}, values))
            step = least_seconds(narrow.decode, rounds)
            share = least_seconds(narrow.read_prompt, 5) / least_seconds(real.read_prompt, 5)
            times = (f"{plain * 1e3:.1f}", f"{kernel * 1e3:.1f}", f"{kernel / plain:.2f}", f"{step * 1e3:.1f}")
            table.add_row(name, *times, f"{share:.1%}")
    console = Console()
    console.print(table)
    console.print(f"class {arguments.name}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
