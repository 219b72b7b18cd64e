"""Benchmark of autoscaling: our policy beside Ray Serve's default, on the same loads in the simulator.

    python -m benchmarks.scaling [--load burst] [--trace FILE] [--duration 1800] [--json FILE]

The real router and schedulers run in virtual time; replicas take `STARTUP_S` to start and leave by draining. A request
misses if its first token comes later than `SLO_TTFT_S`. Replica-hours count from the decision for a replica until it
has ended. `serve` is Serve's policy with its defaults, `serve 70 %` aims at the same use as ours, and `serve quick`
has our hold-down, a look-back of 10 s and a delay of 5 s as well: what a careful operator would set.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.elastic_load import ElasticResult, Policy, arrivals, burst, day, ramp, serve_elastic, spells
from benchmarks.serve_default import ServeDefault, ServeSettings
from holdfast.cluster.load_trace import Arrival, read_trace
from holdfast.cluster.scaling.autoscaler import Autoscaler
from holdfast.cluster.scaling.demand_book import ScalingConfig
from holdfast.cluster.simulate.capacity.capacity import ClusterShape
from holdfast.cluster.simulate.capacity.capacity_report import percentile
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.scheduler.step_time import StepCosts

SLO_TTFT_S: Final = 2.0
STARTUP_S: Final = 10.0
MAX_NUM_SEQS: Final = 8
MAX_REPLICAS: Final = 6
MEAN_PROMPT: Final = 100
MEAN_OUTPUT: Final = 12
SHAPE: Final = ClusterShape(
    num_replicas=1,
    step_costs=StepCosts(base_s=0.4, decode_s=0.01, token_s=0.002),  # few long steps: about 1.2 requests a second
    scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
    num_blocks=512,
    block_size=16,
    max_model_len=1024,
)
LOADS: Final = ("burst", "ramp", "day", "spells")


def load(name: str, duration_s: float) -> list[Arrival]:
    """A load that needs one replica at its quietest, and about four and a half at its busiest."""
    rates = {
        "burst": burst(0.5, 4.0, duration_s * 0.3, duration_s * 0.5),
        "ramp": ramp(0.3, 4.0, duration_s),
        "day": day(0.3, 4.0, duration_s),
        "spells": spells(0.4, 3.5, duration_s / 8, duration_s, seed=5),
    }
    return arrivals(rates[name], 4.0, duration_s, MEAN_PROMPT, MEAN_OUTPUT, seed=1)


def policies() -> dict[str, Policy]:
    ongoing = 0.7 * MAX_NUM_SEQS
    ours = ScalingConfig(max_replicas=MAX_REPLICAS, target_ttft_s=SLO_TTFT_S, startup_s=STARTUP_S)
    return {
        "ours": Autoscaler(ours, MAX_NUM_SEQS),
        "serve": ServeDefault(ServeSettings(max_replicas=MAX_REPLICAS)),
        "serve 70 %": ServeDefault(ServeSettings(max_replicas=MAX_REPLICAS, target_ongoing_requests=ongoing)),
        "serve quick": ServeDefault(
            ServeSettings(
                max_replicas=MAX_REPLICAS,
                target_ongoing_requests=ongoing,
                upscale_delay_s=5.0,
                downscale_delay_s=ours.downscale_after_s,
                look_back_period_s=10.0,
            )
        ),
    }


def compared(trace: Sequence[Arrival], names: Sequence[str] = ()) -> dict[str, ElasticResult]:
    """The load under each policy, or under those of `names`."""
    return {
        name: serve_elastic(trace, SHAPE, policy, startup_s=STARTUP_S)
        for name, policy in policies().items()
        if not names or name in names
    }


def print_table(results: Mapping[str, Mapping[str, ElasticResult]]) -> None:
    table = Table("load", "policy", "requests", f"TTFT > {SLO_TTFT_S:g} s", "TTFT p50, p99", "replica-hours", "changes")
    for load_name, by_policy in results.items():
        for name, result in by_policy.items():
            ttft = sorted(one.ttft_s for one in result.services if one.ttft_s is not None)
            missed, number = result.num_missed(SLO_TTFT_S), len(result.services)
            table.add_row(
                load_name,
                name,
                str(number),
                f"{missed} ({missed / number:.1%})",
                f"{percentile(ttft, 0.5):.2f}, {percentile(ttft, 0.99):.1f}",
                f"{result.replica_s / 3600:.2f}",
                str(len(result.changes)),
            )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--load", choices=LOADS, action="append", help="one of the loads; default: all")
    parser.add_argument("--trace", type=Path, help="JSON lines or CSV to replay instead")
    parser.add_argument("--duration", type=float, default=1800.0, help="virtual seconds of a load")
    parser.add_argument("--json", type=Path, help="where all figures are written to")
    options = parser.parse_args()
    if options.trace:
        traces = {options.trace.name: read_trace(options.trace)}
    else:
        traces = {name: load(name, options.duration) for name in options.load or LOADS}
    results = {name: compared(trace) for name, trace in traces.items()}
    print_table(results)
    if options.json:
        found = {name: {one: asdict(result) for one, result in of.items()} for name, of in results.items()}
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
