"""Benchmark of roles in virtual time: replicas that compute long prompts alone, beside as many that do both.

    python -m benchmarks.roles [--replicas 4] [--minutes 3] [--step-model FILE] [--kib-per-token 22.5] [--gbit 10]
                               [--late-token 4] [--follow] [--json FILE]

Real routers, schedulers and block tiers serve each load in the capacity simulator (docs/simulator.md), by measured step
times and with transfers at the speed of a network. Rates follow from what the replicas can compute. `storm`: chats, and
bursts of prompts of 4,096 tokens. `long`: such prompts alone, with short outputs. `short`: chats alone. `shift`: short,
storm and short again, a third of the time each. Each is served without roles, with 1, 2, ... of the replicas for
prompts, and by `--follow` with a number that follows the load, up to the largest of them. Printed: TPOT and longest
pauses of chats, TTFT, and goodput, the share of requests within both limits, each beside that without roles. Limits are
multiples of what an idle replica takes for such a request, so that they mean the same on a slow machine and a fast one.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from holdfast.cluster.load_trace import Arrival
from holdfast.cluster.simulate.capacity.capacity import CapacityResult, ClusterShape, Service, serve
from holdfast.cluster.simulate.capacity.capacity_report import percentile, read_step_costs
from holdfast.router.config import RouterConfig
from holdfast.router.dispatch import roles
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.scheduler.step_time import StepCosts

LONG: Final = 4096
"""Tokens of a long prompt."""
CHAT: Final = 128, 128
"""Mean tokens of a chat's prompt and output."""
USE: Final = 0.6
"""Share of the replicas' time that a load takes, if each request is alone."""
BURST: Final = 8
"""Long prompts of a burst."""
STORM_SHARE: Final = 0.5
"""Share of a storm's time that long prompts take."""
TTFT_LIMIT: Final = 3.0
"""Limit of the time to the first token, in times that an idle replica takes for such a prompt."""
TPOT_LIMIT: Final = 3.0
"""Limit of the time per token, in steps of an idle replica."""


STEP_COSTS: Final = StepCosts(base_s=4.5e-3, decode_s=1e-4, token_s=5.5e-4, context_token_s=2.5e-7)
"""SmolLM2-135M on two cores of an AMD EPYC: half the CPU time that `benchmarks.disk_tier` takes for prompts of 800 and
8,000 tokens, and for eight streams.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of a load under one choice of roles; times in seconds."""

    load: str
    num_prefill: str
    """Replicas for prompts."""
    chat_tpot_p99: float
    chat_pause_p99: float
    ttft_p50: float
    ttft_p99: float
    goodput: float
    """Share of the requests that kept both limits."""


def prompt_s(costs: StepCosts, num_tokens: int, chunk: int) -> float:
    """Seconds that an idle replica computes a prompt."""
    num_steps = -(-num_tokens // chunk)
    return num_steps * costs.base_s + num_tokens * (costs.token_s + num_tokens / 2 * costs.context_token_s)


def request_s(costs: StepCosts, one: Arrival, chunk: int, batch: int) -> float:
    """Seconds of a replica's time for a request beside `batch` others that share its decoding steps."""
    step_s = costs.base_s / batch + costs.decode_s + costs.token_s + one.num_prompt_tokens * costs.context_token_s
    return prompt_s(costs, one.num_prompt_tokens, chunk) + one.num_output_tokens * step_s


def chat(rng: random.Random, arrival_s: float) -> Arrival:
    prompt, output = (max(8, min(2 * mean, round(rng.expovariate(1 / mean)))) for mean in CHAT)
    return Arrival(arrival_s=arrival_s, num_prompt_tokens=prompt, num_output_tokens=output)


def long_prompt(arrival_s: float) -> Arrival:
    return Arrival(arrival_s=arrival_s, num_prompt_tokens=LONG, num_output_tokens=32)


def made(name: str, shape: ClusterShape, seconds: float) -> list[Arrival]:
    """A load by its name, in order of arrival."""
    if name == "shift":
        parts = [made(part, shape, seconds / 3) for part in ("short", "storm", "short")]
        return [
            replace(one, arrival_s=one.arrival_s + number * seconds / 3)
            for number, part in enumerate(parts)
            for one in part
        ]
    rng, chunk = random.Random(name), shape.scheduler.max_num_batched_tokens
    room_s = USE * shape.num_replicas * seconds
    of_long = {"storm": STORM_SHARE, "long": 1.0, "short": 0.0}[name]
    each_long = request_s(shape.step_costs, long_prompt(0.0), chunk, 4)
    each_chat = request_s(
        shape.step_costs, Arrival(arrival_s=0.0, num_prompt_tokens=128, num_output_tokens=128), chunk, 8
    )
    num_long, num_chats = round(of_long * room_s / each_long), round((1 - of_long) * room_s / each_chat)
    load = [chat(rng, rng.uniform(0, seconds)) for _ in range(num_chats)]
    if name == "storm":
        starts = [rng.uniform(0, seconds) for _ in range(max(1, num_long // BURST))]
        load += [long_prompt(start) for start in starts for _ in range(BURST)]
    else:
        load += [long_prompt(rng.uniform(0, seconds)) for _ in range(num_long)]
    return sorted(load, key=lambda one: one.arrival_s)


def is_good(service: Service, one: Arrival, shape: ClusterShape) -> bool:
    """Whether a request was served within the limits."""
    costs, chunk = shape.step_costs, shape.scheduler.max_num_batched_tokens
    most_tpot_s = TPOT_LIMIT * (costs.base_s + 8 * (costs.decode_s + costs.token_s))
    most_ttft_s = TTFT_LIMIT * (prompt_s(costs, one.num_prompt_tokens, chunk) + most_tpot_s)
    if service.ttft_s is None or service.ttft_s > most_ttft_s:
        return False
    return service.tpot_s is None or service.tpot_s <= most_tpot_s


def outcome(name: str, load: Sequence[Arrival], shape: ClusterShape, config: RouterConfig) -> Outcome:
    """Figures of a load with these roles."""
    result: CapacityResult = serve(load, shape, "prefix_aware", config=config)
    pairs = list(zip(result.services, load, strict=True))
    chats = [service for service, one in pairs if one.num_prompt_tokens < LONG] or [one for one, _ in pairs]
    tpots = sorted(one.tpot_s for one in chats if one.tpot_s is not None)
    ttfts = sorted(one.ttft_s for one, _ in pairs if one.ttft_s is not None)
    return Outcome(
        load=name,
        num_prefill=(
            str(config.prefill_replicas)
            if config.max_prefill_replicas is None
            else f"{config.prefill_replicas} to {config.max_prefill_replicas}"
        ),
        chat_tpot_p99=percentile(tpots, 0.99),
        chat_pause_p99=percentile(sorted(one.pause_s for one in chats), 0.99),
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p99=percentile(ttfts, 0.99),
        goodput=sum(is_good(service, one, shape) for service, one in pairs) / len(pairs),
    )


def show(outcomes: Sequence[Outcome]) -> None:
    """A row for each, with ratios to the same load without roles."""
    table = Table(
        "load", "for prompts", "TPOT p99 ms", "ratio", "pause p99 ms", "ratio", "TTFT p50 / p99 s", "good", "ratio"
    )
    for one in outcomes:
        base = next(other for other in outcomes if other.load == one.load)
        ratios = (
            f"{base.chat_tpot_p99 / one.chat_tpot_p99:.2f}",
            f"{base.chat_pause_p99 / one.chat_pause_p99:.2f}" if one.chat_pause_p99 else "",
            f"{one.goodput / base.goodput:.2f}" if base.goodput else "",
        )
        table.add_row(
            one.load,
            one.num_prefill,
            f"{1e3 * one.chat_tpot_p99:.1f}",
            ratios[0],
            f"{1e3 * one.chat_pause_p99:.0f}",
            ratios[1],
            f"{one.ttft_p50:.2f} / {one.ttft_p99:.2f}",
            f"{one.goodput:.1%}",
            ratios[2],
        )
    Console(width=120).print(table)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-model", type=Path, help="JSON of benchmarks.step_model; default: SmolLM2-135M")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prefill", default="0,1,2", help="numbers of replicas for prompts, with commas")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--kib-per-token", type=float, default=22.5)
    parser.add_argument("--gbit", type=float, default=10.0)
    parser.add_argument("--loads", default="storm,long,short")
    parser.add_argument("--batched-tokens", type=int, default=256)
    parser.add_argument("--decode-alone", action="store_true", help="the others decode alone, and do not do both")
    parser.add_argument("--follow", action="store_true", help="also with a number that follows the load")
    parser.add_argument("--prefill-tokens", type=int, help="router.prefill_tokens")
    parser.add_argument("--late-token", type=float, help="another weight of late tokens in the routers' decision")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.late_token is not None:
        roles.LATE_TOKEN = arguments.late_token  # type: ignore[misc]
    shape = ClusterShape(
        num_replicas=arguments.replicas,
        step_costs=read_step_costs(arguments.step_model) if arguments.step_model else STEP_COSTS,
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=arguments.batched_tokens),
        num_blocks=8192,
        block_size=16,
        max_model_len=8192,
        kv_bytes_per_token=round(1024 * arguments.kib_per_token),
        bytes_per_s=arguments.gbit * 1e9 / 8,
    )
    outcomes = []
    for name in arguments.loads.split(","):
        load = made(name, shape, 60 * arguments.minutes)
        numbers = [int(number) for number in arguments.prefill.split(",")]
        chosen: list[tuple[int, int | None]] = [(number, None) for number in numbers]
        for least, most in [*chosen, *([(0, max(numbers))] if arguments.follow else [])]:
            decode = arguments.replicas if arguments.decode_alone and (least or most) else 0
            options = {
                "prefill_replicas": least,
                "max_prefill_replicas": most,
                "decode_replicas": decode,
                "prefill_tokens": arguments.prefill_tokens,
            }
            outcomes.append(outcome(name, load, shape, RouterConfig(**options)))
    show(outcomes)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))


if __name__ == "__main__":
    main()
