"""Report of a capacity simulation: a table with a row for each routing policy, and a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from holdfast.cluster.simulate.capacity.capacity import CapacityResult
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.scheduler.step_time import StepCosts


def print_results(console: Console, results: Sequence[CapacityResult], slo_ttft_s: float, slo_tpot_s: float) -> None:
    """Milliseconds at the median, the 90th and the 99th percentile; requests a second; busiest over mean replica.

    Loads of several rates are compared by their requested rates.
    """
    are_several = len({result.rate for result in results}) > 1
    last: tuple[str, ...] = (
        ("asked/s", "good/s", "served/s") if are_several else ("good/s", "served/s", "max/mean", "cached")
    )
    if any(result.num_adapter_loads for result in results):
        last = (*(name for name in last if name != "max/mean"), "loads")
    table = Table(box=None, pad_edge=False)
    for name in ("routing", "TTFT ms", "TPOT ms"):
        table.add_column(name, no_wrap=True)
    for name in last:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        ttft, tpot = _served(result)
        cells = {
            "asked/s": f"{result.rate:.1f}",
            "good/s": f"{result.goodput(slo_ttft_s, slo_tpot_s):.1f}",
            "served/s": f"{len(ttft) / result.duration_s:.1f}",
            "max/mean": f"{result.imbalance:.2f}",
            "cached": f"{result.prefix_hit_rate:.0%}",
            "loads": f"{result.num_adapter_loads}",
        }
        table.add_row(result.routing, _percentiles(ttft), _percentiles(tpot), *(cells[name] for name in last))
    console.print(table)
    meaning = "; max/mean: seconds of the replicas in steps" if "max/mean" in last else ""
    meaning += "; loads: adapters that replicas loaded" if "loads" in last else ""
    console.print(f"TTFT, TPOT: median/90th/99th percentile{meaning}")
    console.print(f"good: requests a second with TTFT up to {slo_ttft_s:g} s and TPOT up to {slo_tpot_s:g} s")


def plot(results: Sequence[CapacityResult], path: Path) -> None:
    """Draws how TTFT and TPOT are distributed under each policy. Raises `ConfigurationError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("--plot needs matplotlib: pip install 'holdfast[plot]'") from error

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for result in results:
        for axis, values in zip(axes, _served(result), strict=True):
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            axis.plot([1000 * value for value in values], shares, label=result.routing)
    for axis, name in zip(axes, ("time to first token", "time per output token"), strict=True):
        axis.set(xlabel=f"{name}, ms", ylabel="share of requests", xlim=(0, None), ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=150)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ordered values do not exceed; NaN of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _percentiles(ordered: Sequence[float]) -> str:
    values = [1000 * percentile(ordered, share) for share in (0.5, 0.9, 0.99)]
    return "/".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values)


def _served(result: CapacityResult) -> tuple[list[float], list[float]]:
    """TTFT and TPOT of the requests that were served, in order."""
    ttft = sorted(service.ttft_s for service in result.services if service.ttft_s is not None)
    tpot = sorted(service.tpot_s for service in result.services if service.tpot_s is not None)
    return ttft, tpot


_NAMES: Final = tuple(item.name for item in fields(StepCosts))


def read_step_costs(path: Path) -> StepCosts:
    """The costs in a file; missing costs are 0. Raises `ConfigurationError` where they make no sense."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("it is a list or a single value")
        if unknown := entries.keys() - set(_NAMES):
            raise ValueError(f"it does not know {', '.join(sorted(unknown))}")
        costs = StepCosts(**{name: float(entries.get(name, 0.0)) for name in _NAMES})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"--step-model {path}: {error}; it must be an object of {', '.join(_NAMES)}"
        ) from error
    if not costs.base_s > 0 or not min(asdict(costs).values()) >= 0:
        raise ConfigurationError(f"--step-model {path}: base_s must be above 0, and nothing below it")
    return costs
