"""`holdfast simulate`: the real deciders in virtual time, under drawn faults; or under a load, to ask what it takes."""

import os
import sys
import time
from typing import Annotated

from cyclopts import Group, Parameter

from cluster.flags import ESSENTIALS
from worker.errors import ConfigurationError

_FAULTS = Group.create_ordered("Faults")


def simulate(
    *,
    seeds: Annotated[str, Parameter(group=ESSENTIALS, help="first:end, each a simulation of its own")] = "0:200",
    replay: Annotated[
        int | None, Parameter(group=_FAULTS, help="run this seed alone and print its last events")
    ] = None,
    last: Annotated[int, Parameter(group=_FAULTS, help="so many events of a replay")] = 40,
    jobs: Annotated[int, Parameter(group=_FAULTS, help="cores to use; 0 for all")] = 1,
    max_failures: Annotated[int, Parameter(group=_FAULTS, help="stop after so many seeds that failed")] = 1,
) -> int:
    """Run routers and replicas in virtual time, break them, and check every client's tokens.

    Exit code 1 if any promise was broken. A seed always gives the same simulation.
    """
    if replay is not None:
        return _replay(replay, last)
    return _campaign(_range(seeds), jobs or os.cpu_count() or 1, max_failures)


def _range(seeds: str) -> range:
    first, _, end = seeds.partition(":")
    try:
        chosen = range(int(first), int(end))
    except ValueError:
        raise ConfigurationError(f"--seeds {seeds}: must be two numbers, like 0:200") from None
    if not chosen:
        raise ConfigurationError(f"--seeds {seeds}: the end must be above the first")
    return chosen


def _campaign(seeds: range, jobs: int, max_failures: int) -> int:
    from rich.console import Console

    from cluster.progress import progress
    from cluster.simulate.campaign import run_campaign
    from cluster.simulate.report import print_campaign

    started_s = time.perf_counter()
    with progress(sys.stderr) as report:
        phase = f"simulating seeds {seeds.start} to {seeds.stop - 1}"
        report(phase, 0, len(seeds))
        campaign = run_campaign(
            seeds, jobs=jobs, max_failures=max_failures, on_done=lambda num: report(phase, num, len(seeds))
        )
    print_campaign(Console(), campaign, time.perf_counter() - started_s)
    return 1 if campaign.failures else 0


def _replay(seed: int, num_events: int) -> int:
    from rich.console import Console

    from cluster.simulate.report import replay

    return 1 if replay(Console(), seed, num_events).failure else 0
