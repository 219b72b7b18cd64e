"""Replicas of two ranks lose one of them, or its memory, and end as a whole; their streams go on elsewhere."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.chaos.faults import KILLED_RANK, STARVED_LEADER, STARVED_RANK, Fault
from tests.chaos.forked import ForkedCluster, forked_cluster
from tests.chaos.kinds import KINDS, Kind
from tests.chaos.sweep import sweep
from tests.chaos.tally import Tally

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCluster]:
    making = forked_cluster(tmp_path_factory.mktemp("ranks"), num_ranks=2)
    yield loop.run(making.__aenter__())
    loop.run(making.__aexit__(None, None, None))


@pytest.mark.parametrize("fault", [KILLED_RANK, STARVED_LEADER, STARVED_RANK], ids=lambda fault: fault.name)
@pytest.mark.parametrize("kind", KINDS[:6], ids=lambda kind: kind.name)
def test_no_stream_notices(loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, fault: Fault, tally: Tally):
    loop.run(sweep(cluster, kind, fault, tally, every=20))
