"""Replicas with keys and values in int8 are killed under their streams, which go on elsewhere with the same tokens."""

from pathlib import Path

import pytest

from tests import loops
from tests.chaos.faults import KILLED_REPLICA
from tests.chaos.forked import forked_cluster
from tests.chaos.kinds import KINDS
from tests.chaos.sweep import sweep
from tests.chaos.tally import Tally

KILLED = ("greedy", "seeded", "n=2", "logprobs", "speculation", "beam search")
LIMIT_S = 300


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_no_stream_notices_a_replica_that_is_killed(tmp_path: Path, tally: Tally):
    kinds = [kind for kind in KINDS if kind.name in KILLED]
    assert len(kinds) == len(KILLED)

    async def run() -> None:
        async with forked_cluster(tmp_path, kv_cache_dtype="int8") as cluster:
            for kind in kinds:
                await sweep(cluster, kind, KILLED_REPLICA, tally, every=12)

    loops.run(run(), timeout_s=LIMIT_S)
