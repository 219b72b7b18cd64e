"""What tests of links wait for."""

from tests.fakes import FakeReplica


async def is_dialled(replica: FakeReplica, times: int = 1) -> bool:
    return replica.num_links >= times


async def is_logged(caplog, text: str) -> bool:
    return text in caplog.text
