"""A leader that is stopped while its steps are long is found by its silence, long before twenty steps are over."""

import pytest

from tests import loops
from tests.chaos.faults import FROZEN_REPLICA
from tests.chaos.forked import forked_cluster
from tests.chaos.kinds import KINDS
from tests.chaos.sweep import sweep
from tests.chaos.tally import Tally

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STEP_S = 1.0
"""A replica that sends heartbeats and makes no progress is given twenty such steps."""


async def stop_the_leader(tmp_path, tally: Tally) -> float:
    """Between two tokens of a short answer. Returns how long its client waited for the next one."""
    kind = KINDS[0].longer(4)
    async with forked_cluster(tmp_path, step_s=STEP_S) as cluster:
        await sweep(cluster, kind, FROZEN_REPLICA, tally, every=4)
    return max(tally.row(f"{FROZEN_REPLICA.name}, {kind.name}").pauses_s)


def test_its_stream_goes_on_before_twenty_steps_are_over(tmp_path):
    with loops.runner() as runner:
        pause_s = runner.run(stop_the_leader(tmp_path, Tally()))
    assert pause_s < 10 * STEP_S
