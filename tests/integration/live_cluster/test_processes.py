"""What processes of a live cluster hold: packed weights once, and nothing that is a secret."""

import asyncio
import contextlib
import os
from pathlib import Path

import psutil
import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.serve import models
from holdfast.cluster.serve.ray_internals import session_folder
from holdfast.cluster.serve.start_up import Serving
from holdfast.worker.errors import HoldfastError
from holdfast.worker.executors.cpu.shared_weights import shares_large_pages
from holdfast.worker.sampling_params import SamplingParams
from tests.integration.processes import processes_named, ray_processes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.mark.skipif(not shares_large_pages(), reason="shared memory gets no large pages here")
def test_replicas_have_their_packed_weights_in_memory_once(cluster: Serving):
    """Each rank of one replica has the memory file of the same rank of the other."""
    holders: dict[int, set[int]] = {}
    for process in processes_named(":Replica") + processes_named("RankActor"):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            if "memfd:holdfast-weights-" in os.readlink(descriptor):
                holders.setdefault(descriptor.stat().st_ino, set()).add(process.pid)
    assert [len(pids) for pids in holders.values()] == [2, 2]


def test_what_ray_keeps_of_a_cluster_has_no_token_and_no_prompt(cluster: Serving):

    prompt = "a-most-private-question-about-the-okapi"

    async def ask() -> None:
        async with AsyncClient(cluster.routers) as client:
            await client.generate(prompt, SamplingParams(max_tokens=4))
            with pytest.raises(HoldfastError):
                await client.generate(prompt, SamplingParams(max_tokens=4), model=prompt)

    asyncio.run(ask())
    token = models.directory_of("holdfast").security.remote().result(timeout_s=10).token
    assert len(token) >= 43
    logs = session_folder() / "logs"
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        for secret in (token, prompt):
            assert secret.encode() not in content, path
    for process in ray_processes():
        with contextlib.suppress(psutil.Error):
            said = " ".join([*process.cmdline(), *process.environ().values()])
            assert token not in said, process
