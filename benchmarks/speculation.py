"""Benchmark of speculative decoding: acceptance and speed-up by batch size, on one loaded model, in one run.

    python -m benchmarks.speculation [--batches 1,4,16] [--requests 16] [--rounds 3] [--threads 1]

Three loads: `repetitive` prompts repeat a pattern and the model runs past its end, until it repeats itself; `json list`
is a list of like objects, by a schema; `chat` prompts are questions as users ask the bundled model. Every load is
decoded by every method in turns, round after round, and must give the same tokens. Printed: the share of draft tokens
that were accepted, steps, tokens per second, and the median of the rounds' ratios to plain decoding.
"""

import argparse
import random
import statistics
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console
from rich.table import Table

from holdfast.cluster.bundled_model.bundled_model import bundled_path, located
from holdfast.router.text.chat import render_chat
from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.config import ParallelConfig, SchedulerConfig, SpeculationConfig, WorkerConfig
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation
from holdfast.worker.step_plan import StepRunner
from holdfast.worker.step_update import EngineStats
from scripts.train_bundled_model.chats import dialogue
from scripts.train_bundled_model.curriculum import Curriculum

Method = Literal["none", "ngram", "suffix", "draft"]
METHODS: tuple[Method, ...] = ("none", "ngram", "suffix", "draft")

PEOPLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"enum": ["Anna", "Tom", "Ruth"]},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 8,
    "maxItems": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One method's run over a load."""

    duration_s: float
    tokens: dict[Hashable, list[int]]
    stats: EngineStats


def repetitive_prompts(rng: random.Random, count: int) -> list[str]:
    """Three letters over and over."""
    return [" ".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 3) * 8) for _ in range(count)]


def chat_prompts(rng: random.Random, count: int, tokenizer: Tokenizer) -> list[str]:
    """Conversations up to the assistant's turn."""
    curriculum = Curriculum()
    talks = (dialogue(rng, curriculum)[:-1] for _ in range(count))
    return [render_chat(tokenizer.chat_template, talk, special_tokens=tokenizer.special_tokens) for talk in talks]


def make_loads(tokenizer: Tokenizer, count: int, max_tokens: int, temperature: float) -> dict[str, list[EngineRequest]]:
    """`count` requests of each kind."""
    rng = random.Random(0)
    draw = {"temperature": temperature, "max_tokens": max_tokens}
    schema = SamplingParams(**draw, structured_outputs={"json": PEOPLE})  # type: ignore[arg-type]
    grammar = GrammarCompiler(tokenizer).compile(schema.structure)
    kinds: dict[str, tuple[list[str], SamplingParams, str]] = {
        "repetitive": (repetitive_prompts(rng, count), SamplingParams(**draw, ignore_eos=True), ""),  # type: ignore[arg-type]
        "json list": ([f"List of people, part {i}:" for i in range(count)], schema, grammar),
        "chat": (chat_prompts(rng, count, tokenizer), SamplingParams(**draw), ""),  # type: ignore[arg-type]
    }
    return {
        name: [
            EngineRequest(
                request_id=f"request-{i}",
                prompt_token_ids=tuple(tokenizer.encode(prompt)),
                sampling_params=replace(params, seed=i),
                grammar=text,
            )
            for i, prompt in enumerate(prompts)
        ]
        for name, (prompts, params, text) in kinds.items()
    }


def run(method: Method, runner: StepRunner, info: ModelInfo, load: list[EngineRequest], batch: int) -> Outcome:
    """Decodes `load` to its end, `batch` sequences at a time."""
    config = SchedulerConfig(max_num_seqs=batch, max_num_waiting=len(load))
    scheduler = Scheduler(
        config,
        num_blocks=info.num_blocks,
        window=info.window,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        drafter=Speculation(SpeculationConfig(speculative=method), config),
    )
    tokens: dict[Hashable, list[int]] = {request.request_id: [] for request in load}
    started_s = time.perf_counter()
    for request in load:
        scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        for delta in scheduler.commit(plan, runner.run(plan)):
            tokens[delta.attempt].extend(delta.token_ids)
    return Outcome(duration_s=time.perf_counter() - started_s, tokens=tokens, stats=scheduler.stats())


def load_model(num_threads: int | None) -> tuple[StepRunner, ModelInfo]:
    """The bundled pair, one rank in this process."""
    from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
    from holdfast.worker.executors.tensor_parallel import SingleRank
    from holdfast.worker.replica.rank import default_device, prepare_process

    speculation = SpeculationConfig(speculative="draft")
    config = located(WorkerConfig(speculation=speculation, parallel=ParallelConfig(num_threads=num_threads)))
    device = default_device(config, rank=0)
    prepare_process(config, device)
    group = SingleRank()
    runner = ModelRunner.load(config, group, device=device)
    return LeaderRunner(runner, group), runner.info


def compare(
    runner: StepRunner, info: ModelInfo, load: list[EngineRequest], batch: int, rounds: int
) -> dict[Method, list[Outcome]]:
    """Every method's outcomes, one for each round."""
    outcomes: dict[Method, list[Outcome]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method in METHODS:
            outcomes[method].append(run(method, runner, info, load, batch))
            assert outcomes[method][-1].tokens == outcomes["none"][0].tokens, f"{method} changed the tokens"
    return outcomes


def add_rows(table: Table, name: str, batch: int, outcomes: dict[Method, list[Outcome]]) -> None:
    for method, runs in outcomes.items():
        stats = runs[0].stats
        rate = statistics.median(sum(map(len, item.tokens.values())) / item.duration_s for item in runs)
        ratios = [plain.duration_s / item.duration_s for plain, item in zip(outcomes["none"], runs, strict=True)]
        acceptance = f"{stats.num_accepted_tokens / stats.num_draft_tokens:.0%}" if stats.num_draft_tokens else ""
        ratio = f"{statistics.median(ratios):.2f}x"
        table.add_row(name, str(batch), method, acceptance, str(stats.num_steps), f"{rate:.0f}", ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    runner, info = load_model(arguments.threads)
    tokenizer = Tokenizer.load(str(bundled_path("demo")))
    loads = make_loads(tokenizer, arguments.requests, arguments.max_tokens, arguments.temperature)
    for name, load in loads.items():
        table = Table("load", "batch", "drafts", "accepted", "steps", "tokens/s", "speed-up")
        run("draft", runner, info, load[:2], 1)  # warm
        for batch in map(int, arguments.batches.split(",")):
            add_rows(table, name, batch, compare(runner, info, load, batch, arguments.rounds))
        Console().print(table)


if __name__ == "__main__":
    main()
