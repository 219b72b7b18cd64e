"""All that happens to a cluster in a day, in one run, and no stream notices. What happens is in `whole_day.py`."""

import json
from pathlib import Path

import pytest

from tests.chaos.head_loss import external_store
from tests.chaos.test_head_loss import MISSING
from tests.chaos.test_node_loss import run_program

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.mark.skipif(external_store() is None, reason=MISSING)
def test_no_stream_fails_or_changes_in_a_whole_day(tmp_path: Path):
    """At 70 % of what the replicas can run: 1 to 4 to 1, an update, a canary taken back, a node and the GCS lost."""
    results = tmp_path / "events.json"
    run_program("tests.chaos.whole_day", results, limit_s=600)
    events = json.loads(results.read_text())
    assert len(events) == 7
    for name, event in events.items():
        counts = event["streams"], len(event["failed"]), len(event["changed"])
        print(f"| {name} | {event['seconds']:.1f} | {' | '.join(map(str, counts))} | {event['longest_pause_s']:.2f} |")
    for name, event in events.items():
        assert event["streams"] > 0, name
        assert event["failed"] == [], name
        assert event["changed"] == [], name
