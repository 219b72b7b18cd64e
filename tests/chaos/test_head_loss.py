"""Ray's GCS dies and comes back, and no stream notices. What happens is in `head_loss.py`."""

import json
from pathlib import Path

import pytest

from tests.chaos.head_loss import SERVERS, external_store
from tests.chaos.tally import Row, Tally
from tests.chaos.test_node_loss import run_program

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


MISSING = f"{' or '.join(SERVERS)} is not installed (apt-get install redis-server): GCS fault tolerance needs one"


@pytest.mark.skipif(external_store() is None, reason=MISSING)
def test_no_stream_notices_the_loss_of_the_gcs(tmp_path: Path, tally: Tally):
    """Streams go on, new ones are served while it is away, and a replica that died meanwhile is replaced after it."""
    results = tmp_path / "rows.json"
    run_program("tests.chaos.head_loss", results)
    found = json.loads(results.read_text())
    row = Row(**found["row"])
    tally.add("loss of Ray's GCS, and of a replica while it is away", row)
    print(
        f"the GCS was away for {found['away_s']:.1f} s; a replica served again {found['replaced_after_s']:.1f} s later"
    )
    assert row.num_streams > 0
    assert row.is_clean, row.differences
