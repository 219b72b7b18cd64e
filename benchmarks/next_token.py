"""Benchmark of MTP drafts: tokens per second of one stream with and without, by the share of drafts that come true.

    python -m benchmarks.next_token [--models 0.8B,4B] [--drafts 1,2,3] [--acceptances 0.4,0.6,0.8,1] [--threads 2]
        [--tokens 96] [--rounds 3] [--layers 8]

Models have random weights in shapes of Qwen3.5 with fewer layers and rows of the vocabulary in proportion, and the
next-token layer of its checkpoints. Such a layer guesses nothing right, so acceptance is recorded: the output without
drafts is told first, and in runs with drafts, each draft that the layer has computed is replaced by the recorded token
with the chosen probability, else by another one. All that a draft costs is spent. Runs alternate in one process, every
run must give the same tokens, and a ratio is that of two runs of the same round; the medians are printed. `accepted` is
counted by the scheduler: of several drafts in a row those behind a wrong one are lost. CPU times are of all threads.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.peers.models import draw_weights
from benchmarks.peers.shapes import SHAPES
from holdfast.worker.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    WorkerConfig,
)
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation
from holdfast.worker.step_plan import StepPlan
from holdfast.worker.step_update import EngineStats

_VOCAB: Final = 248_320
MODELS: Final = {"0.8B": ("Q", 24), "4B": ("F", 32)}
"""Shape of a model, and layers of the whole one."""
_PROMPT: Final = 128

COLUMNS: Final = (
    *("drafts", "right", "accepted", "tokens a step", "CPU ms a step"),
    *("tokens/s", "speed-up", "by CPU time"),
)

Drafts = tuple[tuple[int, ...], ...]
Run = tuple[int, float]
"""Drafts of a step, and the probability that one is right."""
Streams = tuple["Stream", "Stream"]
"""Without MTP, and with it."""


def make_model(name: str, num_layers: int, folder: Path) -> Path:
    """Writes a model with its next-token layer. The vocabulary has the part of its rows that `num_layers` are of all
    layers, so that the head keeps its share of a step.
    """
    shape_name, all_layers = MODELS[name]
    shape = SHAPES[shape_name]
    types = [kind for _, kind in zip(range(num_layers), shape.sizes["layer_types"] * all_layers, strict=False)]
    sizes = {
        **shape.sizes,
        "num_hidden_layers": num_layers,
        "layer_types": types,
        "vocab_size": _VOCAB * num_layers // all_layers // 64 * 64,
    }
    config = shape.make_config(**sizes)
    model = shape.make_model(config)
    draw_weights(model)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    _add_layer(folder, type(model.model.layers[0])(config, types.index("full_attention")), config.hidden_size)
    return folder


def _add_layer(folder: Path, layer: torch.nn.Module, hidden: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(like: Tensor) -> Tensor:
        return (torch.randn(like.shape, generator=generator) * 0.02).to(torch.bfloat16)

    tensors: dict[str, Tensor] = {f"mtp.layers.0.{name}": drawn(one) for name, one in layer.state_dict().items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    tensors["mtp.fc.weight"] = drawn(torch.empty(hidden, 2 * hidden))
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


class RecordedDrafts:
    """Drafts that come true with a chosen probability, each by itself, of a request whose output is known."""

    def __init__(self, tokens: Sequence[int], acceptance: float) -> None:
        """`tokens`: the prompt and the output."""
        self._tokens = tokens
        self._acceptance = acceptance
        self._coins = random.Random(0)

    def in_place_of(self, drafts: Drafts, plan: StepPlan) -> Drafts:
        """As many drafts for each sequence of the plan."""
        ends = [one.first_position + len(one.token_ids) for one in plan.sequences]
        return tuple(
            tuple(self._draft(end + place) for place in range(len(own)))
            for end, own in zip(ends, drafts, strict=False)  # none at all where nothing is read
        )

    def _draft(self, position: int) -> int:
        is_right = self._coins.random() < self._acceptance and position < len(self._tokens)
        return self._tokens[position] if is_right else (self._tokens[position % len(self._tokens)] ^ 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request's run: its output, and the seconds from its first token to its last."""

    seconds: float
    cpu_seconds: float
    """Of all threads: with one thread less moved by company on the machine than `seconds`."""
    tokens: list[int]
    stats: EngineStats


class Stream:
    """One model, loaded with MTP or without, that answers one request at a time."""

    def __init__(self, folder: Path, num_threads: int, most_drafts: int) -> None:
        """`most_drafts`: of any run; 0: without MTP."""
        config = WorkerConfig(
            model=ModelConfig(model=str(folder), max_model_len=1024),
            parallel=ParallelConfig(num_threads=num_threads),
            cache=CacheConfig(kv_cache_memory=1 << 28, num_state_slots=2),
            speculation=_speculation(most_drafts),
        )
        self._runner = ModelRunner.load(config, group := SingleRank(), device=torch.device("cpu"))
        self._leader = LeaderRunner(self._runner, group)

    def answer(self, request: EngineRequest, num_drafts: int, recorded: RecordedDrafts | None = None) -> Outcome:
        """Decodes a request with at most this many drafts a step."""
        config, info = SchedulerConfig(max_num_seqs=1), self._runner.info
        scheduler = Scheduler(
            config,
            num_blocks=info.num_blocks,
            num_state_slots=info.num_state_slots,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            eos_token_ids=frozenset(),
            prefix_caching=False,
            drafter=Speculation(_speculation(num_drafts), config),
        )
        scheduler.add(request)
        layer = self._runner.draft
        if recorded is None or layer is None:
            return self._decode(scheduler)
        guess = layer.guess
        with patch.object(layer, "guess", lambda plan: recorded.in_place_of(guess(plan), plan)):
            return self._decode(scheduler)

    def _decode(self, scheduler: Scheduler) -> Outcome:
        tokens: list[int] = []
        started = cpu = 0.0
        while (plan := scheduler.plan()) is not None:
            for delta in scheduler.commit(plan, self._leader.run(plan)):
                tokens += delta.token_ids
                started, cpu = (started, cpu) if started else (time.perf_counter(), time.process_time())
        return Outcome(
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu,
            tokens=tokens,
            stats=scheduler.stats(),
        )


def _speculation(num_drafts: int) -> SpeculationConfig:
    if not num_drafts:
        return SpeculationConfig()
    return SpeculationConfig(speculative="mtp", num_speculative_tokens=num_drafts)


def compare(streams: Streams, request: EngineRequest, runs: Sequence[Run], rounds: int) -> dict[Run, list[Outcome]]:
    """Outcomes of each run, one a round. Runs without drafts are first."""
    plain, with_layer = streams
    known = [*request.prompt_token_ids, *plain.answer(request, 0).tokens]
    with_layer.answer(request, runs[-1][0])
    outcomes: dict[Run, list[Outcome]] = {run: [] for run in runs}
    for _ in range(rounds):
        for run in runs:
            recorded = RecordedDrafts(known, run[1])
            outcome = (with_layer if run[0] else plain).answer(request, run[0], recorded)
            assert outcome.tokens == known[_PROMPT:], f"{run[0]} drafts changed the tokens"
            outcomes[run].append(outcome)
    return outcomes


def rows(outcomes: dict[Run, list[Outcome]]) -> Iterator[list[str]]:
    """Of the table, as its columns say."""
    plain = outcomes[0, 0.0]
    for (num_drafts, acceptance), runs in outcomes.items():
        count, stats = len(runs[0].tokens) - 1, runs[0].stats
        seconds = statistics.median(run.seconds for run in runs)
        num_steps = stats.num_steps - plain[0].stats.num_steps + count
        drafted = f"{stats.num_accepted_tokens / stats.num_draft_tokens:.0%}" if stats.num_draft_tokens else ""
        pairs = list(zip(plain, runs, strict=True))
        ratio = statistics.median(one.seconds / run.seconds for one, run in pairs)
        of_cpu = statistics.median(one.cpu_seconds / run.cpu_seconds for one, run in pairs)
        yield [
            str(num_drafts),
            f"{acceptance:.0%}" if num_drafts else "",
            drafted,
            f"{count / num_steps:.2f}",
            f"{statistics.median(run.cpu_seconds for run in runs) / num_steps * 1e3:.1f}",
            f"{count / seconds:.1f}",
            f"{ratio:.2f}",
            f"{of_cpu:.2f}",
        ]


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--drafts", default="1,2,3")
    parser.add_argument("--acceptances", default="0.4,0.6,0.8,1")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)  # as a replica does; the layer's threads are as many
    numbers = [int(number) for number in options.drafts.split(",")]
    shares = [float(share) for share in options.acceptances.split(",")]
    runs = [(0, 0.0), *((number, share) for number in numbers for share in shares)]
    source = random.Random(0)
    request = EngineRequest(
        request_id="one",
        prompt_token_ids=tuple(source.randrange(300, 20_000) for _ in range(_PROMPT)),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, seed=0),
    )
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(name, options.layers, Path(folder) / name)
            streams = Stream(path, options.threads, 0), Stream(path, options.threads, max(numbers))
            table = Table(*COLUMNS, title=name)
            for row in rows(compare(streams, request, runs, options.rounds)):
                table.add_row(*row)
            Console().print(table)


if __name__ == "__main__":
    main()
