"""Block sources: which other replica a submission names, from which blocks of its prefix can be had."""

from dataclasses import replace

from holdfast.router.config import RouterConfig
from holdfast.router.events import SendTakePins
from holdfast.worker.request import BlockSource
from holdfast.worker.step_update import EngineStats
from tests.router.core import Core, delta, facts, load, sent
from tests.router.dispatch.test_prefix_routing import cached_on


def up(core: Core, replica_id: str, **changes: object) -> None:
    known = facts(replica_id, **{"transfers_blocks": True, "address": f"{replica_id}:1", **changes})
    core.dispatch.replica_up(known, load(), core.now)


def both(policy: str = "prefix_aware") -> Core:
    core = Core(RouterConfig(routing_policy=policy))
    up(core, "a")
    up(core, "b")
    return core


def retire(core: Core, replica_id: str) -> list:
    return core.dispatch.replica_retiring(replica_id, True, core.now)


def test_a_prompt_that_another_replica_has_cached_names_it():
    core = both()
    cached_on(core, "a")
    retire(core, "a")
    submission = sent(core.submit("one", num_prompt_tokens=641))
    assert submission.replica_id == "b"
    assert submission.request.block_source == BlockSource("a:1", 640)


def test_a_replica_that_has_as_much_itself_is_told_of_none():
    core = both()
    cached_on(core, "a")
    cached_on(core, "b")
    assert sent(core.submit("one", num_prompt_tokens=641)).request.block_source is None


def test_a_request_that_moves_names_the_replica_that_it_leaves():
    core = both()
    attempt = sent(core.submit("one", num_prompt_tokens=50))
    other = {"a": "b", "b": "a"}[attempt.replica_id]
    core.step(delta(attempt.attempt, 0, 1, 2, 3), replica_id=attempt.replica_id)
    moved = sent(retire(core, attempt.replica_id))
    assert moved.replica_id == other
    assert moved.request.block_source == BlockSource(f"{attempt.replica_id}:1", 53)


def test_a_replica_that_was_lost_is_not_named():
    core = both()
    attempt = sent(core.submit("one", num_prompt_tokens=50))
    core.step(delta(attempt.attempt, 0, 1), replica_id=attempt.replica_id)
    assert sent(core.down(attempt.replica_id)).request.block_source is None


def test_replicas_of_another_version_and_those_that_send_none_are_not_named():
    for changes in ({"release": "other"}, {"transfers_blocks": False}, {"address": ""}):
        core = Core()
        core.dispatch.replica_up(replace(facts("a", transfers_blocks=True, address="a:1"), **changes), load(), core.now)
        cached_on(core, "a")
        retire(core, "a")
        up(core, "b")
        assert sent(core.submit("one", num_prompt_tokens=641)).request.block_source is None, changes


def test_other_policies_know_of_no_prefix_but_of_the_replica_that_is_left():
    core = both("round_robin")
    cached_on(core, "a")
    cached_on(core, "b")
    attempt = sent(core.submit("one", num_prompt_tokens=641))
    assert attempt.request.block_source is None
    core.step(delta(attempt.attempt, 0, 1), replica_id=attempt.replica_id)
    assert sent(retire(core, attempt.replica_id)).request.block_source == BlockSource(f"{attempt.replica_id}:1", 642)


KNOWN = {"answers_digest": b"four", "release": "1"}


def on_other_ranks(core: Core, **changes: object) -> None:
    """One replica of two ranks, and then one of one."""
    up(core, "a", **{**KNOWN, **changes})
    up(core, "b", **KNOWN, tensor_parallel_size=1)


def test_another_number_of_ranks_is_another_version_with_the_same_keys_and_values():
    core = Core()
    on_other_ranks(core)
    cached_on(core, "a")
    retire(core, "a")
    assert sent(core.submit("one", num_prompt_tokens=641)).request.block_source == BlockSource("a:1", 640)


def test_ranks_that_are_not_known_to_compute_the_same_are_not_named():
    for changes in ({"answers_digest": b""}, {"row_invariant": False}, {"max_model_len": 999}):
        core = Core()
        on_other_ranks(core, **changes)
        cached_on(core, "a")
        retire(core, "a")
        assert sent(core.submit("one", num_prompt_tokens=641)).request.block_source is None, changes


def test_a_source_says_how_many_tokens_its_blocks_have_where_that_is_another_number():
    core = Core()
    up(core, "a", block_size=32)
    up(core, "b")
    attempt = sent(core.submit("one", num_prompt_tokens=50))
    core.step(delta(attempt.attempt, 0, 1, 2, 3), replica_id=attempt.replica_id)
    size = {"a": 32, "b": 16}[attempt.replica_id]
    moved = sent(retire(core, attempt.replica_id))
    assert moved.request.block_source == BlockSource(f"{attempt.replica_id}:1", 53, block_size=size)


def test_loads_name_who_sent_to_whom_also_once_the_sender_is_lost():
    core = both()
    told = EngineStats(received_tokens_from={"a:1": 640, "10.0.0.9:7": 16})
    core.step(replica_id="b", stats=told)
    for is_lost in (False, True):
        if is_lost:
            core.down("a")
        (told,) = [one for one in core.dispatch.loads() if one.replica_id == "b"]
        assert told.received_from == {"a": 640, "10.0.0.9:7": 16}
        assert told.role == ""


# --- pins of a replica that leaves ---


def heirs(actions: list) -> list[tuple[str, str]]:
    return [(one.replica_id, one.address) for one in actions if isinstance(one, SendTakePins)]


def test_one_replica_is_told_to_pin_what_a_retiring_one_has_pinned_and_all_routers_choose_the_same():
    for order in ("abc", "cba"):
        core = Core()
        for replica_id in order:
            up(core, replica_id, num_blocks=200 if replica_id == "c" else 300)
        assert heirs(retire(core, "a")) == [("b", "a:1")]
        assert heirs(retire(core, "a")) == [], "links repeat it"


def test_an_heir_that_leaves_or_is_lost_has_another_one_after_it():
    core = both()
    up(core, "c")
    up(core, "d")
    assert heirs(retire(core, "a")) == [("b", "a:1")]
    assert set(heirs(retire(core, "b"))) == {("c", "a:1"), ("c", "b:1")}
    assert set(heirs(core.down("c"))) == {("d", "a:1"), ("d", "b:1")}


def test_the_next_replica_of_the_same_version_is_the_heir_where_there_is_none():
    core = Core()
    up(core, "a")
    assert heirs(retire(core, "a")) == []
    assert (
        heirs(core.dispatch.replica_up(facts("b", transfers_blocks=True, address="b:1", release="2"), load(), 0)) == []
    )
    up_again = facts("c", transfers_blocks=True, address="c:1")
    assert heirs(core.dispatch.replica_up(up_again, load(), core.now)) == [("c", "a:1")]


def test_one_that_is_called_back_and_retires_again_hands_on_again():
    core = both()
    retire(core, "a")
    core.dispatch.replica_retiring("a", False, core.now)
    assert heirs(retire(core, "a")) == [("b", "a:1")]


def test_pins_are_handed_to_other_ranks_and_not_to_other_blocks():
    core = Core()
    on_other_ranks(core)
    up(core, "c", block_size=32, num_blocks=900, **KNOWN)
    assert heirs(retire(core, "a")) == [("b", "a:1")]
    assert heirs(core.down("b")) == []


def test_replicas_that_send_no_blocks_have_no_heirs():
    core = Core()
    core.dispatch.replica_up(facts("a"), load(), core.now)
    core.dispatch.replica_up(facts("b"), load(), core.now)
    assert heirs(retire(core, "a")) == []
