"""Campaign of simulations: seed after seed, on one core or several, and their common tally.

What may not live here: printing (`report.py`), and what a simulation is (`world.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from holdfast.cluster.simulate.world.world import Failure, Outcome, Tally, simulate


@dataclass(slots=True, kw_only=True)
class Campaign:
    """What a range of seeds came to."""

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
    """Simulates the seeds in order, until `max_failures` have failed. `on_done` hears how many have been simulated."""
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
