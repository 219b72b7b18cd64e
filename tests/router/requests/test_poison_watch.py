"""Which request is taken for the end of routers, and which is not: journals are lists, and time is moved."""

from dataclasses import dataclass, field, replace

import pytest

from holdfast.router.requests.poison_watch import (
    FORGET_S,
    HUNG_S,
    MAX_LOSSES,
    PIECE_BYTES,
    RETRY_S,
    WHOLE_BYTES,
    Entry,
    PoisonWatch,
    begin_reading,
    end_reading,
    lasting_parts,
    losses_of,
    request_digest,
)
from holdfast.router.router_losses import RouterLoss
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError, OnTrialError, ReplicaError, RequestQuarantinedError
from holdfast.worker.request import PoisonRisk

NOW = 1_000.0


@dataclass
class ListJournal:
    """What lies in it when its router ends is what the others find."""

    entries: dict[int, Entry] = field(default_factory=dict)
    num: int = 0

    def enter(self, digest: str, poison_risk: PoisonRisk, *, is_known_good: bool) -> int:
        self.num += 1
        self.entries[self.num] = Entry(digest=digest, poison_risk=poison_risk, is_known_good=is_known_good)
        return self.num

    def clear(self, place: int) -> None:
        del self.entries[place]


class Routers:
    """Routers that tell each other everything, and one time for all."""

    def __init__(self, count: int = 3) -> None:
        self.time = NOW
        self.all = {f"r{index}": self.new() for index in range(count)}

    def new(self) -> PoisonWatch:
        return PoisonWatch(ListJournal(), lambda: self.time)

    def end(self, name: str, *, is_own_fault: bool = False) -> tuple[RouterLoss, ...]:
        """One ends; the others find its journal."""
        journal = self.all.pop(name).journal
        losses = losses_of(tuple(journal.entries.values()), name, self.time, is_own_fault=is_own_fault)
        for watch in self.all.values():
            watch.note(losses)
        return losses


def test_a_router_that_is_killed_costs_no_request_that_it_was_reading():
    """Fifty are read alone, one after the other, and then as any other."""
    routers = Routers()
    digests = [f"{number:02}" for number in range(50)]
    for digest in digests:
        routers.all["r0"].begin(digest)
    assert len(routers.end("r0")) == 50
    watch = routers.all["r1"]
    for digest in digests:
        reading = watch.begin(digest)
        assert reading.poison_risk is PoisonRisk.ON_TRIAL
        if digest != digests[-1]:
            with pytest.raises(ReplicaError) as refused:
                watch.begin(digests[-1])
            assert refused.value.retry_after_s == RETRY_S
        reading.admitted()
        assert watch.begin(digest).poison_risk is PoisonRisk.NONE
    assert watch.known_losses() == ()
    assert watch.num_trials == 50


def test_what_ends_a_second_router_on_trial_is_convicted_and_its_neighbours_are_not():
    routers = Routers()
    for digest in ("poison", "a", "b"):
        routers.all["r0"].begin(digest)
    routers.end("r0")
    routers.all["r1"].begin("poison")
    routers.all["r1"].begin("c")
    assert [loss.digest for loss in routers.end("r1")] == ["poison"]
    watch = routers.all["r2"]
    with pytest.raises(RequestQuarantinedError, match="2 routers have ended"):
        watch.begin("poison")
    for digest in ("a", "b"):
        watch.begin(digest).admitted()
    assert watch.begin("c").poison_risk is PoisonRisk.NONE
    assert watch.num_refused == 1


def test_two_routers_that_end_before_they_know_of_each_other_are_enough():
    routers = Routers()
    routers.all["r0"].begin("poison")
    routers.all["r1"].begin("poison")
    routers.end("r0")
    routers.end("r1")
    with pytest.raises(RequestQuarantinedError):
        routers.all["r2"].begin("poison")


@pytest.mark.parametrize("company", [(), ("a",)])
def test_a_router_that_hung_is_proof_against_what_it_read_alone(company):
    routers = Routers()
    for digest in ("poison", "poison", *company):  # sent six times at once, it is still one request
        routers.all["r0"].begin(digest)
    routers.end("r0", is_own_fault=True)
    if company:
        assert routers.all["r1"].begin("poison").poison_risk is PoisonRisk.ON_TRIAL
    else:
        with pytest.raises(RequestQuarantinedError, match="a router has ended"):
            routers.all["r1"].begin("poison")


def test_a_request_that_has_been_admitted_since_is_counted_anew():
    """Of identical requests that never stop, some are read whenever a router is killed."""
    routers = Routers(4)
    routers.all["r0"].begin("same")
    routers.end("r0")
    for name in ("r1", "r2"):
        routers.all[name].begin("same").admitted()
        routers.all[name].begin("same")
    message = routers.all["r3"].known_losses()
    routers.end("r1")
    assert routers.all["r3"].begin("same").poison_risk is PoisonRisk.ON_TRIAL
    late = routers.new()
    late.note(routers.all["r3"].known_losses())
    late.note(message)  # comes late
    assert late.begin("same").poison_risk is PoisonRisk.ON_TRIAL


def test_a_refusal_clears_too_and_a_client_that_leaves_does_not():
    routers = Routers()
    watch = routers.all["r1"]
    watch.note([RouterLoss(digest="d", router="gone", at_s=NOW)])
    watch.begin("d").end(is_cleared=False)
    assert watch.begin("d").poison_risk is PoisonRisk.ON_TRIAL
    watch.end_trial("d", is_cleared=False)
    watch.begin("d").end(is_cleared=True)
    assert watch.begin("d").poison_risk is PoisonRisk.NONE


def test_clients_say_what_they_have_lost():
    watch = PoisonWatch(journal := ListJournal())
    reading = begin_reading(watch, "/v1/completions", b"{}")
    reading.suspect(0)
    assert reading.poison_risk is PoisonRisk.NONE
    reading.suspect(1)
    assert [entry.poison_risk for entry in journal.entries.values()] == [PoisonRisk.ON_TRIAL]
    with pytest.raises(ReplicaError):
        begin_reading(watch, "/v1/completions", b"[]").suspect(1)
    end_reading(ValueError())
    reading.admitted()
    assert not journal.entries
    begin_reading(watch, "/v1/completions", b"[]").suspect(1)
    end_reading()
    assert not journal.entries


def test_what_a_router_may_end_with_is_not_read_before_its_end_is_seen():
    """Its connections close before: a client is here again at once."""
    watch = PoisonWatch(ListJournal())
    silent_for_s = {"hung": HUNG_S, "ended": 0.1}
    watch.is_read_elsewhere = lambda digest, silent_s: silent_for_s.get(digest, -1.0) >= silent_s
    with pytest.raises(OnTrialError):
        watch.begin("hung")
    reading = watch.begin("ended")
    reading.suspect(0)
    with pytest.raises(OnTrialError):
        reading.suspect(1)
    assert reading.poison_risk is PoisonRisk.NONE
    reading.end(is_cleared=True)
    silent_for_s.clear()
    watch.begin("ended").suspect(1)
    assert watch.num_trials == 1


def test_a_request_of_many_prompts_is_read_until_the_last_is_admitted():
    watch = PoisonWatch(journal := ListJournal())
    reading = watch.begin("many")
    reading.expect(3)
    for left in (1, 1, 0):
        reading.admitted()
        assert len(journal.entries) == left


def test_losses_are_forgotten():
    routers = Routers()
    watch = routers.all["r0"]
    for number in range(MAX_LOSSES + 10):
        watch.note([RouterLoss(digest=f"{number:06}", router="gone", at_s=NOW + number / 1000)])
    assert len(watch.known_losses()) == MAX_LOSSES
    routers.time += FORGET_S + 5
    assert watch.known_losses() == ()
    watch.note([RouterLoss(digest="old", router="gone", at_s=NOW, is_proof=True)])
    assert watch.begin("old").poison_risk is PoisonRisk.NONE


def test_news_are_told_once():
    heard = []
    watch = PoisonWatch(ListJournal(), lambda: NOW)
    watch.on_change = lambda: heard.append(watch.known_losses())
    loss = RouterLoss(digest="d", router="gone", at_s=NOW)
    for _ in range(3):
        watch.note([loss, replace(loss, at_s=NOW + 1)])
    assert heard == [(loss,)]
    watch.begin("d").admitted()
    watch.note([loss])
    assert heard == [(loss,), ()]


def test_a_request_that_is_sent_again_has_the_same_digest():
    """However large, whatever has come of it meanwhile, and in its own way for each method."""
    message = inference_pb2.GenerateRequest(text="x" * 100_000, model="m", request_id="r", attempt=1, timeout_ms=5000)
    again = inference_pb2.GenerateRequest()
    again.CopyFrom(message)
    again.attempt, again.timeout_ms = 2, 4000
    again.resume.sequences.add(token_ids=[1, 2], text_length=2)
    again.request_id = "s"
    other = inference_pb2.GenerateRequest(text="x" * 100_001, model="m", request_id="r", attempt=1, timeout_ms=5000)
    kept = [request_digest("m", *lasting_parts(one.SerializeToString())) for one in (message, again, other)]
    assert kept[0] == kept[1] != kept[2]
    assert request_digest("a", b"x") != request_digest("b", b"x")


def test_what_is_no_message_is_taken_as_it_is():
    for junk in (
        b"\xff" * 70_000,
        b"\x08",
        b"\x0b" * 70_000,
        b"\x12\xff\xff\x7f" + bytes(70_000),
        b"\x08\x01" * 40_000,
    ):
        assert lasting_parts(junk) == [junk]


def test_a_digest_of_megabytes_depends_on_their_ends_their_size_and_pieces_between():
    content = bytearray(8 * 2**20)
    digests = {request_digest("m", bytes(content))}
    step = (len(content) - 2 * WHOLE_BYTES) // 64
    for at in (0, WHOLE_BYTES - 1, WHOLE_BYTES + 3 * step + PIECE_BYTES - 1, len(content) - 1):
        content[at] = 1
        digests.add(request_digest("m", bytes(content)))
        content[at] = 0
    digests.add(request_digest("m", bytes(content) + b"\0"))
    assert len(digests) == 6


def test_a_header_that_says_nothing_is_refused():
    from holdfast.router.router_losses import routers_lost

    assert routers_lost("2") == 2
    for text in ("-1", "", "x", "²", "1" * 4):
        with pytest.raises(InvalidRequestError, match="x-holdfast-routers-lost"):
            routers_lost(text)
