"""Perplexities beside a reference: from a file, from another server, and from Hugging Face's own model."""

import asyncio
import json
from pathlib import Path

import pytest

from holdfast.cluster.commands import cli
from holdfast.cluster.commands.verify_reference import reference_of
from holdfast.worker.errors import ConfigurationError
from tests import loops
from tests.chaos.forked import forked_cluster

TOLERANCE = "0.0005"
LIMIT_S = 300
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def test_a_server_is_as_its_hugging_face_model_and_as_another_router_of_it(tmp_path: Path):
    by_hand, by_server, wrong = tmp_path / "by_hand.json", tmp_path / "by_server.json", tmp_path / "wrong.json"

    def verified(url: str, *flags: str) -> int:
        return cli.run(["verify", url, "--checks", "numbers", "--tolerance", TOLERANCE, *flags])

    def commands(one: str, other: str) -> None:
        assert verified(one, "--reference", "demo", "--write-reference", str(by_hand)) == 0
        assert verified(one, "--reference", other, "--write-reference", str(by_server)) == 0
        assert verified(one, "--reference", str(by_hand)) == 0
        entries = json.loads(by_hand.read_text())
        assert entries.keys() == json.loads(by_server.read_text()).keys()
        entries["prose"]["nats_per_character"] *= 1.001
        wrong.write_text(json.dumps(entries))
        assert verified(one, "--reference", str(wrong)) == 1

    async def run() -> None:
        async with forked_cluster(tmp_path, step_s=0.0) as cluster:
            await asyncio.to_thread(commands, *(f"http://{router.http_address}" for router in cluster.routers))

    loops.run(run(), timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("source", "reason"),
    [("http://127.0.0.1:9", "cannot be measured"), ("no/such/folder", "transformers cannot load it")],
)
def test_a_reference_that_is_not_there_is_refused(source: str, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match=f"--reference {source}.*{reason}"):
        reference_of(source)


def test_a_file_that_is_no_reference_is_refused(tmp_path: Path):
    path = tmp_path / "reference.json"
    path.write_text("[1]")
    with pytest.raises(ConfigurationError, match="must be an object of objects"):
        reference_of(str(path))
