"""Journals of processes that end in every way, and what the others make of them."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cluster.serve.crash_journal import SUFFIX, CrashJournal, CrashJournals, left_journal
from holdfast.router.requests.poison_watch import FORGET_S, HUNG_S, Entry, PoisonWatch
from holdfast.router.requests.reading_journal import MAX_HUNG_S, NUM_PLACES
from holdfast.worker.errors import OnTrialError
from holdfast.worker.request import PoisonRisk
from holdfast.worker.timers import WallClock
from tests.loops import on_each_loop

DIGEST = "ab" * 16

ROUTER = """
import os, sys
from pathlib import Path
from holdfast.cluster.serve.crash_journal import CrashJournal
from holdfast.worker.errors import OnTrialError
from holdfast.worker.request import PoisonRisk
from holdfast.worker.timers import WallClock
journal = CrashJournal(Path(sys.argv[1]))
place = journal.enter(sys.argv[2], PoisonRisk[sys.argv[3]], is_known_good=False)
journal.clear(journal.enter("00" * 16, PoisonRisk.NONE, is_known_good=False))
print(flush=True)
sys.stdin.readline()
if sys.argv[4] == "in order":
    journal.close()
elif sys.argv[4] == "no memory":
    journal.note_no_memory()
    os._exit(1)
"""


@asynccontextmanager
async def other_router(folder: Path, end: str, poison_risk: str = "NONE"):
    """A process that reads one request, and ends when the block does."""
    command = [sys.executable, "-c", ROUTER, str(folder), DIGEST, poison_risk, end]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    await asyncio.to_thread(process.stdout.readline)
    yield process
    if end == "killed":
        process.kill()
    process.stdin.close()
    await asyncio.to_thread(process.wait)
    process.stdout.close()


async def heard(watch: PoisonWatch) -> asyncio.Event:
    event = asyncio.Event()
    watch.on_change = event.set
    return event


@on_each_loop
async def test_the_others_hear_at_once_of_a_router_that_ends(tmp_path: Path):
    for number, (end, poison_risk, is_proof) in enumerate(
        [("killed", "NONE", False), ("killed", "ON_TRIAL", True), ("no memory", "NONE", True)]
    ):
        folder = tmp_path / str(number)
        watch = PoisonWatch(now=WallClock(time.time(), time.monotonic))
        event = await heard(watch)
        async with other_router(folder, end, poison_risk):
            journals = CrashJournals(folder, watch)
            following = asyncio.create_task(journals.follow())
            await asyncio.sleep(0)
            assert watch.known_losses() == (), "it is alive"
        await asyncio.wait_for(event.wait(), 10)
        (loss,) = watch.known_losses()
        assert (loss.digest, loss.is_proof) == (DIGEST, is_proof), end
        following.cancel()
        await asyncio.wait([following])
        journals.own.close()
        late = PoisonWatch(now=WallClock(time.time(), time.monotonic))  # of a router that starts later
        journals = CrashJournals(folder, late)
        following = asyncio.create_task(journals.follow())
        await asyncio.sleep(0)
        (same,) = late.known_losses()
        assert replace(same, at_s=loss.at_s) == loss
        assert same.at_s == pytest.approx(loss.at_s, abs=0.1)
        following.cancel()
        await asyncio.wait([following])
        journals.own.close()


@on_each_loop
async def test_a_router_that_ends_in_order_says_nothing(tmp_path: Path):
    watch = PoisonWatch(now=WallClock(time.time(), time.monotonic))
    async with other_router(tmp_path, "in order") as process:
        journals = CrashJournals(tmp_path, watch)
        following = asyncio.create_task(journals.follow())
        await asyncio.sleep(0)
        ending = os.pidfd_open(process.pid)
        gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(ending, gone.set)
    await asyncio.wait_for(gone.wait(), 10)
    loop.remove_reader(ending)
    os.close(ending)
    await asyncio.sleep(0.01)
    assert watch.known_losses() == ()
    assert list(tmp_path.glob(f"*{SUFFIX}")) == [journals.own.path]
    following.cancel()
    await asyncio.wait([following])


def test_what_is_read_lies_in_the_file(tmp_path: Path):
    own = CrashJournal(tmp_path)
    left = left_journal(own.path)
    places = [own.enter(f"{number:032x}", PoisonRisk.NONE, is_known_good=True) for number in range(NUM_PLACES)]
    assert own.enter(DIGEST, PoisonRisk.NONE, is_known_good=False) == 0, "there is no place left"
    own.clear(0)
    for place in places[:-1]:
        own.clear(place)
    assert list(left.entries()) == [Entry(digest=f"{NUM_PLACES - 1:032x}", is_known_good=True)]
    assert oct(own.path.stat().st_mode & 0o777) == "0o600"
    assert own.enter("", PoisonRisk.NONE, is_known_good=False) == 0
    now = time.monotonic()
    assert not left.says_nothing(now)
    assert left.says_nothing(now + FORGET_S + 1)
    assert left.says_nothing(now - 1), "the machine has been started since"


@pytest.mark.parametrize(("later_s", "is_proof"), [(HUNG_S / 2, False), (HUNG_S + 1, True)])
def test_a_loop_that_does_not_turn_has_hung(later_s, is_proof, tmp_path: Path):
    own = CrashJournal(tmp_path)
    own.enter(DIGEST, PoisonRisk.NONE, is_known_good=False)
    left_journal(own.path).note_end(time.monotonic() + later_s)
    (loss,) = left_journal(own.path).losses(own.path.name, time.monotonic() + 60, 1000.0)
    assert loss.at_s == pytest.approx(940, abs=1)
    assert loss.is_proof == is_proof


def test_what_another_router_reads_is_seen_while_it_is_not_known_to_have_ended(tmp_path: Path):
    own = CrashJournal(tmp_path)
    place = own.enter(DIGEST, PoisonRisk.NONE, is_known_good=False)
    left, now = left_journal(own.path), time.monotonic()
    assert left.is_reading(DIGEST, 0.0, now)
    assert not left.is_reading("cd" * 16, 0.0, now)
    assert not left.is_reading(DIGEST, HUNG_S, now), "its loop turns"
    assert left.is_reading(DIGEST, HUNG_S, now + HUNG_S + 1)
    assert not left.is_reading(DIGEST, HUNG_S, now + MAX_HUNG_S + 1), "nobody ends it"
    own.clear(place)
    assert not left.is_reading(DIGEST, 0.0, now)


@on_each_loop
async def test_a_request_waits_for_the_end_of_a_router_that_reads_it(tmp_path: Path):
    watch = PoisonWatch(now=WallClock(time.time(), time.monotonic))
    event = await heard(watch)
    async with other_router(tmp_path, "killed"):
        journals = CrashJournals(tmp_path, watch)
        following = asyncio.create_task(journals.follow())
        await asyncio.sleep(0)
        with pytest.raises(OnTrialError):
            watch.begin(DIGEST).suspect(1)
    await asyncio.wait_for(event.wait(), 10)
    assert watch.begin(DIGEST).poison_risk is PoisonRisk.ON_TRIAL
    following.cancel()
    await asyncio.wait([following])
    journals.own.close()


def test_other_files_are_left_alone(tmp_path: Path):
    path = tmp_path / f"1:1{SUFFIX}"
    path.write_bytes(bytes(100_000))
    with pytest.raises(ValueError, match="no reading journal"):
        left_journal(path)
    journals = CrashJournals(tmp_path, PoisonWatch())
    journals._look(None)
    assert path.exists()


@on_each_loop
async def test_the_watch_of_a_router_that_found_no_port_gives_way_to_the_next(tmp_path: Path):
    first, second = (PoisonWatch(now=WallClock(time.time(), time.monotonic)) for _ in range(2))
    event = await heard(first)
    async with other_router(tmp_path, "killed"):
        journals = CrashJournals(tmp_path, first)
        following = asyncio.create_task(journals.follow())
        await asyncio.sleep(0)
    await asyncio.wait_for(event.wait(), 10)
    message = await heard(second)
    journals.serve(second)
    await asyncio.wait_for(message.wait(), 10)
    (loss,) = second.known_losses()
    assert loss.digest == DIGEST
    assert second.journal is journals.own
    following.cancel()
    await asyncio.wait([following])
    journals.own.close()
