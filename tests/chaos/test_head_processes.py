"""Serve's controller, agents of a node and the head's raylet die, and no stream notices. What happens is in
`head_processes.py`.
"""

import json
from pathlib import Path

import pytest

from tests.chaos.head_loss import external_store
from tests.chaos.tally import Row, Tally
from tests.chaos.test_head_loss import MISSING
from tests.chaos.test_node_loss import run_program

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

LOSSES = {
    "Serve's controller",
    "the dashboard agent of a node",
    "the runtime-env agent of a node",
    "the raylet of a node",
    "the head's raylet",
}
NEEDS_STORE = pytest.mark.skipif(external_store() is None, reason=MISSING)


@pytest.mark.parametrize("has_redis", [False, pytest.param(True, marks=NEEDS_STORE)], ids=["alone", "redis"])
def test_no_stream_notices_what_the_head_loses(tmp_path: Path, tally: Tally, has_redis: bool):
    """Streams go on, new ones are served meanwhile, and what died is replaced: after the loss of the head's raylet
    where the GCS keeps its tables outside, and its supervisor has started the head again.
    """
    results = tmp_path / "losses.json"
    run_program("tests.chaos.head_processes", results, *(["--redis"] if has_redis else []))
    losses = json.loads(results.read_text())
    assert losses.keys() == LOSSES
    for name, loss in losses.items():
        row = Row(**loss["row"])
        tally.add(f"{name}{', GCS in Redis' if has_redis else ''}", row)
        print(f"{name}: lasted {loss['lasted_s']:.1f} s, whole again {loss['replaced_after_s']:.1f} s later")
        assert row.num_streams > 0
        assert row.is_clean, row.differences
