"""Campaign of simulations: seed after seed, on one core or several, and their common tally."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cluster.simulate.kernel.network import Connection
from holdfast.cluster.simulate.kernel.timeline import Event
from holdfast.cluster.simulate.world.world import Failure, Outcome, Tally, simulate


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Results of a range of seeds."""

    tally: Tally = field(default_factory=Tally)
    failures: list[Failure] = field(default_factory=list)
    async_scheduling: bool = False
    """Whether replicas had two plans in flight."""


def run_campaign(
    seeds: Iterable[int],
    *,
    jobs: int = 1,
    max_failures: int = 1,
    async_scheduling: bool = False,
    on_done: Callable[[int], None] = lambda num: None,
) -> Campaign:
    """Simulates the seeds in order, until `max_failures` have failed. `on_done` gets the number of simulated seeds."""
    campaign = Campaign(async_scheduling=async_scheduling)
    for outcome in _outcomes(seeds, jobs, partial(simulate, async_scheduling=async_scheduling)):
        campaign.tally.add(outcome.tally)
        if outcome.failure is not None:
            campaign.failures.append(outcome.failure)
        on_done(campaign.tally.num_simulations)
        if len(campaign.failures) >= max_failures:
            break
    return campaign


def _outcomes(seeds: Iterable[int], jobs: int, simulate: Callable[[int], Outcome]) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(simulate, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(simulate, seeds, chunksize=8)
        finally:
            pool.shutdown(cancel_futures=True)


_MAX_WIDTH: Final = 160  # characters of a line


def print_campaign(console: Console, campaign: Campaign, wall_s: float) -> None:
    """Prints the counts of the simulations, and for each failure the command that repeats it."""
    tally = campaign.tally
    rows = (
        ("simulations", f"{tally.num_simulations:,} ({tally.simulated_s:,.0f} simulated s in {wall_s:.1f} s)"),
        ("requests", f"{tally.num_requests:,} ({60 * tally.num_requests / wall_s:,.0f} a minute)"),
        ("", _counts(tally.outcomes)),
        ("tokens", f"{tally.num_tokens:,} received, {tally.num_sampled_tokens:,} sampled in {tally.num_steps:,} steps"),
        *([("planned ahead", f"{tally.num_ahead:,} steps")] if campaign.async_scheduling else []),
        ("events", f"{tally.num_events:,}"),
        ("faults", f"{sum(tally.faults.values()):,}"),
        ("", _counts(tally.faults)),
        ("reconnects", f"{tally.num_reconnects:,}, each with the client's resume record"),
        ("stragglers", f"{tally.num_stragglers:,} late calls, {tally.num_turned_away:,} superseded by a newer one"),
        ("killed", f"{tally.num_condemned:,} frozen replicas, by their health checks"),
        ("restarted", f"{tally.num_restarted:,} requests, because an update removed the version that they ran on"),
        ("poisoned", f"{tally.num_poisoned:,} replicas, crashed by poisonous requests"),
        ("attacks", f"{sum(tally.attacks.values()):,}"),
        ("", _counts(tally.attacks)),
        ("hung", f"{tally.num_hung:,} routers, killed by their hang supervisors"),
        ("crashed", f"{tally.num_crashed:,} routers, by requests of attacks that they were reading"),
        ("false alarms", f"{tally.num_falsely_quarantined:,} quarantined requests that had crashed nothing"),
        ("promises broken", str(len(campaign.failures))),
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    for failure in campaign.failures:
        console.print(Text(str(failure), style="red"), soft_wrap=True)
        flag = " --async-scheduling" if campaign.async_scheduling else ""
        console.print(f"replay it with: holdfast simulate --replay {failure.seed}{flag}", highlight=False)


def replay(console: Console, seed: int, num_events: int, *, async_scheduling: bool = False) -> Outcome:
    """Runs one seed again and prints its last `num_events` events."""
    last: deque[Event] = deque(maxlen=num_events)
    outcome = simulate(seed, last.append, async_scheduling=async_scheduling)
    for event in last:
        console.print(Text(describe(event)), soft_wrap=True)
    if outcome.failure is None:
        console.print(f"seed {seed}: every promise was kept, in {outcome.tally.num_events:,} events")
    else:
        console.print(Text(str(outcome.failure), style="red"), soft_wrap=True)
    return outcome


def describe(event: Event) -> str:
    """One line: number, time, who, what."""
    line = f"{event.number:>7} {event.time_s:11.6f} s  {_what(event.action, event.args)}"
    return line if len(line) <= _MAX_WIDTH else line[: _MAX_WIDTH - 3] + "..."


def _what(action: Callable[..., None], args: tuple[Any, ...]) -> str:
    owner = getattr(action, "__self__", None)
    if isinstance(owner, Connection):
        side, message = args
        return f"{owner.ends[1 - side]} > {owner.ends[side]}: {message}"
    shown = (arg.__name__.strip("_") if callable(arg) else str(arg) for arg in args)
    return " ".join([str(owner), action.__name__.strip("_"), *shown])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in sorted(counter.items()))
