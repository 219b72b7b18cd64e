"""Two versions of a model: what has begun on one goes on there, or ends with a word; canaries get their share."""

import pytest

from holdfast.router.config import RouterConfig
from holdfast.router.events import Fail
from holdfast.router.operator_state import NO_OPERATOR_STATE, Canary
from holdfast.worker.errors import VersionGoneError
from tests.router.core import Core, aborts, delta, facts, failure, load, sent

OLD, NEW = facts("old", release="1"), facts("new", release="2")
WAIT_S = 30.0


def up(core: Core, replica_id: str, release: str = "1", num_waiting: int = 0, **changes: object) -> list:
    known = facts(replica_id, release=release, **changes)
    actions = core.dispatch.replica_up(known, load(num_waiting=num_waiting), core.now)
    core.dispatch.check_integrity()
    return actions


def begun(core: Core, request_id: str, replica_id: str) -> int:
    """Submits a request and has its first token come from a replica."""
    submission = sent(core.submit(request_id))
    assert submission.replica_id == replica_id
    core.step(delta(submission.attempt, 0, 7), replica_id=replica_id)
    return submission.attempt


def order(core: Core, operator_state) -> list:
    actions = core.dispatch.set_operator_state(operator_state, core.now)
    core.dispatch.check_integrity()
    return actions


def test_what_has_begun_waits_for_its_version_and_blocks_nobody():
    core = Core(RouterConfig(replica_wait_s=WAIT_S))
    up(core, "a", "1")
    begun(core, "x", "a")
    up(core, "b", "2")
    assert core.down("a") == []
    assert sent(core.submit("y")).replica_id == "b"
    again = sent(up(core, "c", "1"))
    assert (again.replica_id, again.request.request_id, again.request.output_token_ids) == ("c", "x", (7,))


def test_what_has_not_begun_goes_to_any_version():
    core = Core()
    up(core, "a", "1")
    core.submit("x")
    up(core, "b", "2")
    assert sent(core.down("a")).replica_id == "b"


def test_a_version_that_does_not_come_back_is_given_up_in_time():
    core = Core(RouterConfig(replica_wait_s=WAIT_S))
    up(core, "a", "1")
    begun(core, "x", "a")
    up(core, "b", "2")
    core.down("a")
    assert core.dispatch.next_tick == core.now + WAIT_S
    assert core.tick(WAIT_S - 0.1) == []
    error = failure(core.tick(0.1)).error
    assert isinstance(error, VersionGoneError)
    assert (error.model, error.version) == ("m", OLD.version)
    assert core.dispatch.num_open == 0
    with pytest.raises(VersionGoneError):  # and whoever comes with such output later is told at once
        resumed(core, "z", OLD.fingerprint)


def test_a_retired_version_is_given_up_at_once():
    core = Core()
    up(core, "a", "1")
    begun(core, "x", "a")
    up(core, "b", "2")
    core.down("a")
    error = failure(order(core, NO_OPERATOR_STATE.with_retired("m", OLD.version, True))).error
    assert isinstance(error, VersionGoneError)


def test_what_runs_on_a_retired_version_ends_normally():
    core = Core()
    up(core, "a", "1")
    attempt = begun(core, "x", "a")
    up(core, "b", "2")
    core.dispatch.replica_retiring("a", True, core.now)
    assert order(core, NO_OPERATOR_STATE.with_retired("m", OLD.version, True)) == []
    core.step(delta(attempt, 1, 8), replica_id="a")
    assert core.dispatch.num_open == 1


def test_a_draining_replica_hands_over_to_its_own_version_alone():
    core = Core()
    up(core, "a", "1")
    begun(core, "x", "a")
    attempt = sent(core.submit("y")).attempt  # nothing has come of it yet
    up(core, "b", "2")
    actions = core.dispatch.replica_retiring("a", True, core.now)
    assert (sent(actions).replica_id, sent(actions).request.request_id) == ("b", "y")
    assert aborts(actions) == [("a", attempt)]
    actions = up(core, "c", "1")
    assert (sent(actions).replica_id, sent(actions).request.request_id) == ("c", "x")


def resumed(core: Core, request_id: str, fingerprint: str) -> list:
    from holdfast.router.dispatch.request_state import RequestState
    from holdfast.router.events import CaughtUp
    from holdfast.worker.request import EngineRequest
    from holdfast.worker.sampling_params import SamplingParams
    from tests.router.core import LetterText

    params = SamplingParams(seed=1, max_tokens=100)
    request = EngineRequest(
        request_id=request_id, prompt_token_ids=(7,), sampling_params=params, output_token_ids=(1, 2)
    )
    state = RequestState(
        request=request,
        model="m",
        text=LetterText(),
        caught_up=CaughtUp(fingerprint=fingerprint),
        deadline=core.now + 60,
    )
    return core.dispatch.submit(state, core.now)


def test_a_resumed_stream_goes_on_at_the_version_it_came_from():
    core = Core()
    up(core, "a", "1")
    up(core, "b", "2")
    for number in range(4):
        assert sent(resumed(core, f"old {number}", OLD.fingerprint)).replica_id == "a"
        assert sent(resumed(core, f"new {number}", NEW.fingerprint)).replica_id == "b"


def test_a_version_that_this_router_never_saw_is_waited_for():
    core = Core(RouterConfig(replica_wait_s=WAIT_S))
    up(core, "b", "2")
    assert resumed(core, "x", OLD.fingerprint) == []
    assert sent(up(core, "a", "1")).replica_id == "a"


def test_all_completions_of_one_request_come_from_one_version():
    core = Core()
    up(core, "a", "1")
    first = sent(core.submit("g/0", group_id="g")).attempt
    core.step(delta(first, 0, 7), replica_id="a")
    up(core, "b", "2")
    core.dispatch.replica_retiring("a", True, core.now)
    assert core.submit("g/1", group_id="g") == []  # for its sibling runs on the old one
    assert sent(core.submit("other")).replica_id == "b"
    moved = [sent([action]).request for action in up(core, "c", "1") if hasattr(action, "request")]
    assert {(one.request_id, one.sequence_index) for one in moved} == {("g", 0), ("g", 1)}


def canary(share: float):
    return NO_OPERATOR_STATE.with_canary("m", Canary(model="m", version=NEW.version, share=share))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_a_canary_gets_its_share_and_a_retry_stays(share: float):
    core = Core(RouterConfig(max_waiting_per_replica=1000))
    up(core, "a", "1")
    up(core, "b", "2")
    order(core, canary(share))
    went = {}
    for number in range(400):
        went[f"r{number}"] = sent(core.submit(f"r{number}")).replica_id
        core.cancel(f"r{number}")
    assert abs(sum(replica == "b" for replica in went.values()) / 400 - share) < 0.05
    assert (share in (0.0, 1.0)) == (len(set(went.values())) == 1)
    assert all(sent(core.submit(request_id)).replica_id == replica for request_id, replica in went.items())


def test_a_larger_share_keeps_those_who_were_there():
    core = Core()
    up(core, "a", "1")
    up(core, "b", "2")
    small, large = set(), set()
    for share, found in ((0.2, small), (0.5, large)):
        order(core, canary(share))
        for number in range(100):
            if sent(core.submit(f"r{number}")).replica_id == "b":
                found.add(number)
            core.cancel(f"r{number}")
    assert small < large


def test_nothing_is_refused_because_a_canary_is_down_or_alone():
    core = Core()
    up(core, "a", "1")
    order(core, canary(1.0))
    assert sent(core.submit("x")).replica_id == "a"
    core.down("a")
    order(core, canary(0.0))
    assert {sent([one]).request.request_id for one in up(core, "b", "2")} == {"x"}


def test_each_version_has_its_counts():
    core = Core()
    up(core, "a", "1")
    begun(core, "x", "a")
    core.now += 2.0
    up(core, "b", "2")
    core.dispatch.replica_retiring("a", True, core.now)
    attempt = sent(core.submit("y")).attempt
    core.now += 3.0
    core.step(delta(attempt, 0, 1), replica_id="b")
    core.dispatch.replica_retiring("a", False, core.now)
    core.down("a")
    core.down("b")
    counts = {one.version: one for one in core.dispatch.version_counts()}
    assert (counts[OLD.version].num_failed, counts[OLD.version].num_lost) == (1, 1)
    assert (counts[NEW.version].num_failed, counts[NEW.version].first_token_s) == (1, 3.0)


def test_an_update_ends_only_what_is_bound():
    core = Core()
    up(core, "a", "1")
    for number in range(3):
        begun(core, f"x{number}", "a")
    core.submit("free")
    up(core, "b", "2")
    operator_state = NO_OPERATOR_STATE.with_retired("m", OLD.version, True)
    order(core, operator_state)
    actions = core.down("a")
    assert sent(actions).request.request_id == "free"
    ended = [one.request_id for one in (*actions, *core.tick()) if isinstance(one, Fail)]
    assert sorted(ended) == ["x0", "x1", "x2"]
