"""The response store on SQLite and PostgreSQL: turns in order, tenants apart, bounds, and a writer that is killed."""

import asyncio
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.router.config import RouterConfig
from holdfast.router.store.database import FILE, Database
from holdfast.router.store.object_store import ObjectStore, StoreLimits
from holdfast.router.store.response_store import ResponseStore, StoredResponse
from holdfast.worker.errors import InvalidRequestError, NotFoundError, StoreError
from tests.loops import on_a_loop

PLENTY = 2**30
SERVERS = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))


def response(name: str, previous: str | None = None, *, text: str = "") -> StoredResponse:
    item = {"id": f"in_{name}", "type": "message", "role": "user", "content": text or name}
    return StoredResponse(
        id=name,
        previous_id=previous,
        input=[item],
        response={"id": name, "output": [{"id": f"out_{name}"}]},
    )


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """A server of its own, which listens on a socket in its folder alone."""
    if not SERVERS:
        pytest.skip("needs a PostgreSQL server (apt install postgresql)")
    # Not below pytest's folder, which any run of pytest closes to other accounts: the server does not run as root.
    with tempfile.TemporaryDirectory(prefix="holdfast-pg-") as name:
        folder, binaries, account = Path(name), SERVERS[-1].parent, pwd.getpwnam("nobody")
        account_of: list[str] = []
        if os.geteuid() == 0:
            os.chown(folder, account.pw_uid, account.pw_gid)
            account_of = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
        create = [*account_of, binaries / "initdb", "-D", "data", "-U", "holdfast", "-A", "trust"]
        subprocess.run(create, check=True, **quiet)
        options = ["-c", "listen_addresses=", "-k", folder, "-c", "fsync=off"]
        server = subprocess.Popen([*account_of, binaries / "postgres", "-D", "data", *options], **quiet)
        ready = [binaries / "pg_isready", "-q", "-h", folder, "-t", "30"]
        while subprocess.run(ready, check=False, **quiet).returncode and server.poll() is None:
            pass
        assert server.poll() is None, "the server has ended"
        yield f"postgresql://holdfast@/postgres?host={folder}"
        server.send_signal(signal.SIGINT)
        server.wait(30)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "sqlite" else request.getfixturevalue("postgresql")


async def opened(place: str, now: Callable[[], float] = lambda: 1000.0, **limits: float) -> ResponseStore:
    return ResponseStore(ObjectStore(await Database.open(place, now), StoreLimits(**limits)))


@on_a_loop
async def test_a_conversation_is_read_oldest_turn_first_within_its_tenant(place):
    store = await opened(place)
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "a")):
        await store.save("t", response(name, previous))
    await store.save("u", response("a", text="of another tenant"))
    turns = await store.turns("t", "c", PLENTY)
    assert [one.id for one in turns] == ["a", "b", "c"]
    assert turns[0].items() == [*response("a").input, {"id": "out_a"}]
    assert [one.id for one in await store.turns("t", "d", PLENTY)] == ["a", "d"]
    with pytest.raises(NotFoundError):
        await store.get("u", "b")
    await store.delete("t", "b")
    with pytest.raises(InvalidRequestError, match="'b' is not, or was deleted"):
        await store.turns("t", "c", PLENTY)
    assert (await store.get("u", "a")).input[0]["content"] == "of another tenant"
    with pytest.raises(InvalidRequestError, match="at most 10 bytes"):
        await store.turns("t", "d", 10)
    for tenant, name in (("t", "a"), ("t", "c"), ("t", "d"), ("u", "a")):
        await store.delete(tenant, name)
    await store.database.close()


@on_a_loop
async def test_conversations_of_one_id_are_apart_by_tenant_and_grow_with_turns(place):
    store = await opened(place)
    conversations = store.conversations
    for tenant in ("t", "u"):
        await conversations.create(tenant, {"id": "c"}, [{"id": "x", "of": tenant}])
    turn = response("r")
    turn.response.update(status="completed", conversation={"id": "c"})
    for _ in range(2):  # it was asked for again
        await store.save("t", turn)
    assert [item["id"] for item in await conversations.all_items("t", "c", PLENTY)] == ["x", "in_r", "out_r"]
    assert await conversations.all_items("u", "c", PLENTY) == [{"id": "x", "of": "u"}]
    assert (await conversations.item("u", "c", "x"))["of"] == "u"
    with pytest.raises(InvalidRequestError, match="must have at most 20 bytes"):
        await conversations.all_items("t", "c", 20)
    await conversations.delete_item("u", "c", "x")
    assert (await conversations.item("t", "c", "x"))["of"] == "t"
    await store.objects.delete("t", "conversation", "c")
    assert await conversations.all_items("u", "c", PLENTY) == []
    await store.objects.delete("u", "conversation", "c")
    await store.delete("t", "r")
    await store.database.close()


@on_a_loop
async def test_the_same_response_takes_its_own_place_and_may_hold_any_text(place):
    store, odd = await opened(place), "\x00 \ud800 \U0001f600 '; DROP TABLE holdfast_responses; --"
    await store.save("t", response("a"))
    await store.save("t", response("a", text=odd))
    assert (await store.get("t", "a")).input[0]["content"] == odd
    await store.delete("t", "a")
    await store.database.close()


@on_a_loop
async def test_old_responses_and_the_oldest_of_too_many_are_deleted(place):
    now = 1000.0
    store = await opened(place, lambda: now, retention_s=100.0, max_bytes=3000)
    await store.save("t", response("old"))
    now = 1060.0
    for number in range(4):
        now += 1
        await store.save("t", response(f"r{number}", text="x" * 700))
    await store.objects.purge()
    with pytest.raises(NotFoundError):
        await store.get("t", "old")  # the oldest beyond the size
    assert [(await store.get("t", f"r{number}")).id for number in range(1, 4)] == ["r1", "r2", "r3"]
    now += 100.5
    await store.objects.purge()
    for number in range(4):
        with pytest.raises(NotFoundError):
            await store.get("t", f"r{number}")
    await store.database.close()


@on_a_loop
async def test_routers_write_at_the_same_time(place):
    stores = [await opened(place) for _ in range(3)]
    await asyncio.gather(
        *(store.save("t", response(f"{index}-{number}")) for index, store in enumerate(stores) for number in range(20))
    )
    for store in stores:
        assert (await store.get("t", "2-19")).id == "2-19"
    for index in range(3):
        for number in range(20):
            await stores[0].delete("t", f"{index}-{number}")
    for store in stores:
        await store.database.close()


WRITER = """
import asyncio, sys
from tests.router.store.test_response_store import opened, response

async def write():
    store = await opened(sys.argv[1])
    for number in range(10**6):
        await store.save("t", response(f"r{number}", text="x" * 3000))
        print(number, flush=True)

asyncio.run(write())
"""


def test_a_writer_that_is_killed_loses_nothing_that_it_had_stored(tmp_path):
    for after in (1, 4, 9):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True)
        told = 0
        for line in writer.stdout:
            if (told := int(line)) == after:
                writer.kill()
        writer.wait()

        async def check(told: int) -> None:
            store = await opened(str(tmp_path))
            for number in range(told + 1):
                assert len((await store.get("t", f"r{number}")).input[0]["content"]) == 3000
            await store.database.close()

        asyncio.run(check(told))


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("mysql://host/base", "must be a folder, or a URL"),
        ("postgresql://host", "must be a folder, or a URL"),
        ("postgresql://me:secret@host/base", "must have no password"),
    ],
)
def test_other_places_are_refused(store, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        RouterConfig(store=store)
    assert "secret" not in str(refused.value).split("input_value")[0]


@on_a_loop
async def test_a_place_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / FILE).write_bytes(b"no database, but long enough to be taken for one" * 100)
    for place in (str(tmp_path / "file"), str(tmp_path), "postgresql://nobody@/none?host=/nowhere"):
        with pytest.raises(StoreError, match="cannot be opened"):
            await Database.open(place)
