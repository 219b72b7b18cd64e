"""A small file system under Ray's session folder fills up, for real. What happens is in `full_disk.py`."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.tally import Row, Tally
from tests.chaos.test_node_loss import run_program

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

SIZE = "640m"


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path("/tmp") / f"hf{tmp_path_factory.getbasetemp().name[-6:]}"  # paths of sockets must be short
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


def test_streams_go_on_on_a_full_disk_which_is_said_and_mends_itself(tmp_path: Path, small_disk: Path, tally: Tally):
    results = tmp_path / "found.json"
    run_program("tests.chaos.full_disk", results, str(small_disk))
    found = json.loads(results.read_text())
    row = Row(**found["row"])
    tally.add("full disk, and loss of a replica meanwhile", row)
    print(
        f"{found['num_replicas_while_full']} replicas while it was full; "
        f"two again {found['replaced_after_s']:.1f} s after there was room"
    )
    assert found["num_replicas_while_full"] == 1
    assert row.num_streams > 0
    assert row.is_clean, row.differences
    (warning,) = found["warnings"]
    assert "what ends there is not replaced until there is room; delete old sessions" in warning
    assert found["logged"] >= 4, "each router and replica says it"
    assert found["is_said_to_be_mended"]
