"""Benchmark of the batching policies, on the same mixed-length load, in one run.

    python -m benchmarks.batching [--policies static bucketed memory_aware continuous] [--num-blocks N]
                                  [--requests 96] [--max-num-seqs 16] [--model demo] [--rounds 3] [--threads N]

All requests wait at the start; outputs have 4 to 256 tokens with a heavy tail, so that a static batch mostly waits for
its longest member. All policies run on one loaded model, in turns, and must give the same tokens. Printed for each:
tokens per second, their ratio to the first policy's, preemptions, and the share of the allocated KV slots that held no
token. With fewer blocks than the sequences need (`--num-blocks 100`), it shows what preemptions cost.
"""

import argparse
import platform
import random
import statistics
import sys
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.bucketed_batching import BucketedBatching
from benchmarks.static_batching import StaticBatching
from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.batching import POLICIES as CHOOSABLE
from holdfast.worker.scheduler.batching import MakePolicy
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StepRunner

_PIPE_WIDTH = 120
"""Columns where the output is no terminal: wide enough that no row is broken."""

BASELINES: Final[dict[str, MakePolicy]] = {"static": StaticBatching, "bucketed": BucketedBatching}
"""They run without prefix caching, as such systems did."""
POLICIES: Final = (*BASELINES, "memory_aware", "continuous")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One policy's run over the whole load."""

    duration_s: float
    tokens: dict[Hashable, list[int]]
    num_steps: int
    num_preemptions: int
    wasted_share: float
    """Mean over steps of (allocated slots that hold no token) / (allocated slots)."""
    most_wasted_slots: float
    """The most slots wasted for each sequence of a step, over all steps."""

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens.values())) / self.duration_s


def make_load(num_requests: int, vocab_size: int, seed: int) -> list[EngineRequest]:
    """Requests with prompts of 8 to 64 random tokens and outputs of 4 to 256, most of them short (Pareto, shape 1)."""
    rng = random.Random(seed)
    return [
        EngineRequest(
            request_id=f"request-{i}",
            prompt_token_ids=tuple(rng.randrange(vocab_size) for _ in range(rng.randint(8, 64))),
            sampling_params=SamplingParams(
                temperature=0, seed=i, ignore_eos=True, max_tokens=min(256, int(4 * rng.paretovariate(0.7)))
            ),
        )
        for i in range(num_requests)
    ]


def run(policy: str, runner: StepRunner, info: ModelInfo, load: list[EngineRequest], max_num_seqs: int) -> Outcome:
    """Runs `load` to its end under one policy."""
    make_policy = BASELINES.get(policy) or CHOOSABLE[policy]
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_waiting=len(load))
    scheduler = Scheduler(
        config,
        num_blocks=info.num_blocks,
        window=info.window,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        prefix_caching=policy not in BASELINES,
        make_policy=make_policy,
    )
    tokens: dict[Hashable, list[int]] = {request.request_id: [] for request in load}
    shares, per_sequence = [], []
    started_s = time.perf_counter()
    for request in load:
        scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        for delta in scheduler.commit(plan, runner.run(plan)):
            tokens[delta.attempt].extend(delta.token_ids)
        stats = scheduler.stats()
        if stats.num_used_blocks:
            shares.append(stats.num_wasted_slots / (stats.num_used_blocks * info.block_size))
            per_sequence.append(stats.num_wasted_slots / scheduler.load().num_running)
    return Outcome(
        duration_s=time.perf_counter() - started_s,
        tokens=tokens,
        num_steps=scheduler.stats().num_steps,
        num_preemptions=scheduler.stats().num_preemptions,
        wasted_share=statistics.fmean(shares),
        most_wasted_slots=max(per_sequence),
    )


def load_model(model: str, num_blocks: int | None, num_threads: int | None = None) -> tuple[StepRunner, ModelInfo]:
    """One rank in this process."""
    from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
    from holdfast.worker.executors.tensor_parallel import SingleRank
    from holdfast.worker.replica.rank import default_device, prepare_process

    path = str(bundled_path(model)) if model == "demo" else model
    config = WorkerConfig(
        model=ModelConfig(model=path, served_model_name=model),
        parallel=ParallelConfig(num_threads=num_threads),
        cache=CacheConfig(num_blocks=num_blocks),
    )
    device = default_device(config, rank=0)
    prepare_process(config, device)
    group = SingleRank()
    runner = ModelRunner.load(config, group, device=device)
    return LeaderRunner(runner, group), runner.info


def report(outcomes: dict[str, list[Outcome]], info: ModelInfo) -> Table:
    first = next(iter(outcomes))
    table = Table("policy", "tokens/s", f"x {first}", "steps", "preempted", "KV slots wasted", "most per sequence")
    for policy, runs in outcomes.items():
        ratios = [run.tokens_per_s / base.tokens_per_s for run, base in zip(runs, outcomes[first], strict=True)]
        rate = statistics.median(outcome.tokens_per_s for outcome in runs)
        last = runs[-1]
        table.add_row(
            policy,
            f"{rate:.0f}",
            f"{statistics.median(ratios):.2f}",
            str(last.num_steps),
            str(last.num_preemptions),
            f"{last.wasted_share:.1%}",
            f"{last.most_wasted_slots:.1f} of blocks of {info.block_size}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--num-blocks", type=int, help="blocks of the KV cache; unset: as memory allows")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="CPU threads; unset: as many as cores")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    runner, info = load_model(arguments.model, arguments.num_blocks, arguments.threads)
    load = make_load(arguments.requests, info.vocab_size, arguments.seed)
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in arguments.policies}
    for number in range(arguments.rounds):
        for policy in outcomes:
            console.print(f"round {number + 1}/{arguments.rounds}: {policy}", highlight=False)
            outcomes[policy].append(run(policy, runner, info, load, arguments.max_num_seqs))
    tokens = outcomes[arguments.policies[0]][0].tokens
    assert all(run.tokens == tokens for runs in outcomes.values() for run in runs), "the policies disagree on tokens"

    lengths = sorted(map(len, tokens.values()))
    console.print(
        f"{info.model} ({info.dtype}) on {platform.processor() or platform.machine()}: {len(load)} requests, "
        f"outputs {lengths[0]} to {lengths[-1]} tokens, median {statistics.median(lengths):.0f}, "
        f"at most {arguments.max_num_seqs} sequences",
        highlight=False,
    )
    console.print(report(outcomes, info))
    console.print("all policies gave the same tokens", highlight=False)


if __name__ == "__main__":
    main()
