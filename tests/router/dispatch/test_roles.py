"""Roles of replicas: who computes long prompts, when a request is handed on, and what happens without one of them.

With `prefill_tokens` a prompt is long by its length; without, by measured seconds.
"""

import pytest

from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.roles import Role
from holdfast.router.events import SendAhead
from holdfast.worker.request import BlockSource
from holdfast.worker.step_update import EngineStats
from tests.router.core import Core, aborts, delta, load, sent
from tests.router.dispatch.test_block_sources import retire, up
from tests.router.dispatch.test_prefix_routing import cached_on

LONG = 641


def core_of(*names: str, prefill: int = 1, decode: int = 0) -> Core:
    core = Core(RouterConfig(prefill_replicas=prefill, decode_replicas=decode, prefill_tokens=512))
    for name in names:
        up(core, name)
    return core


def roles(core: Core) -> dict[str, Role]:
    return {replica.facts.replica_id: replica.role for replica in core.dispatch.registry}


def test_roles_go_by_the_order_of_ids():
    core = core_of("c", "a", "b", "d", prefill=1, decode=2)
    assert roles(core) == {"a": Role.PREFILL, "b": Role.DECODE, "c": Role.DECODE, "d": Role.BOTH}
    told = {one.replica_id: one.role for one in core.dispatch.loads()}
    assert told == {"a": "prefill", "b": "decode", "c": "decode", "d": "both"}


def test_a_lost_role_is_taken_over():
    core = core_of("a", "b", "c", decode=1)
    core.down("a")
    assert roles(core) == {"b": Role.PREFILL, "c": Role.DECODE}
    core.down("b")
    assert roles(core) == {"c": Role.BOTH}


def test_without_a_replica_that_sends_blocks_there_are_no_roles():
    core = Core(RouterConfig(prefill_replicas=1))
    core.up("a")
    core.up("b")
    assert set(roles(core).values()) == {Role.BOTH}


def test_a_long_prompt_is_computed_in_one_place_and_decoded_in_another():
    core = core_of("a", "b", decode=1)
    first = sent(core.submit("one", num_prompt_tokens=LONG))
    assert (first.replica_id, first.request.block_source) == ("a", None)
    actions = core.step(delta(first.attempt, 0, 5), replica_id="a")
    moved = sent(actions)
    assert moved.replica_id == "b"
    assert moved.request.output_token_ids == (5,)
    assert moved.request.block_source == BlockSource("a:1", LONG + 1)
    assert aborts(actions) == [("a", first.attempt)]


def test_a_short_prompt_is_computed_where_it_is_decoded():
    core = core_of("a", "b", decode=1)
    for number in range(4):
        assert sent(core.submit(f"{number}", num_prompt_tokens=100)).replica_id == "b"


def test_a_long_prompt_that_is_cached_where_it_is_decoded_is_short():
    core = core_of("a", "b", decode=1)
    cached_on(core, "b")
    assert sent(core.submit("one", num_prompt_tokens=LONG)).replica_id == "b"


def test_without_room_at_the_others_it_goes_on_where_its_prompt_was_computed_and_moves_later():
    core = core_of("a", "b", decode=1)
    first = sent(core.submit("one", num_prompt_tokens=LONG))
    retire(core, "b")
    assert aborts(core.step(delta(first.attempt, 0, 5), replica_id="a")) == []
    actions = core.dispatch.replica_retiring("b", False, core.now)
    assert sent(actions).replica_id == "b"


def test_a_long_prompt_goes_to_the_others_if_its_replica_takes_nothing():
    core = core_of("a", "b", decode=1)
    retire(core, "a")
    assert sent(core.submit("one", num_prompt_tokens=LONG)).replica_id == "b"


def test_a_request_that_ends_with_its_first_token_is_not_moved():
    core = core_of("a", "b", decode=1)
    first = sent(core.submit("one", num_prompt_tokens=LONG, stop_at=5))
    actions = core.step(delta(first.attempt, 0, 5), replica_id="a")
    assert not [action for action in actions if hasattr(action, "request")]
    assert core.dispatch.num_open == 0
    assert core.step(replica_id="a") == []


def test_a_failed_over_request_goes_to_a_replica_that_decodes():
    core = core_of("a", "b", "c", decode=2)
    first = sent(core.submit("one", num_prompt_tokens=LONG))
    moved = sent(core.step(delta(first.attempt, 0, 5), replica_id="a"))
    core.step(delta(moved.attempt, 1, 6), replica_id=moved.replica_id)
    again = sent(core.down(moved.replica_id))
    assert again.replica_id != "a" or roles(core)["a"] is Role.BOTH


def told_ahead(actions: list) -> list[SendAhead]:
    return [action for action in actions if isinstance(action, SendAhead)]


def test_the_replica_that_will_decode_is_told_when_the_prompt_is_sent_to_the_other():
    core = core_of("a", "b", "c", decode=2)
    actions = core.submit("one", num_prompt_tokens=LONG)
    (ahead,) = told_ahead(actions)
    assert (ahead.replica_id in ("b", "c"), ahead.attempt) == (True, sent(actions).attempt)
    assert ahead.request.block_source == BlockSource("a:1", LONG, is_computing=True)
    moved = core.step(delta(sent(actions).attempt, 0, 5), replica_id="a")
    assert sent(moved).replica_id == ahead.replica_id
    assert told_ahead(moved) == []
    assert told_ahead(core.submit("two", num_prompt_tokens=100)) == []


def test_a_busier_replica_does_not_get_it_for_what_it_has_of_it():
    core = core_of("a", "b", "c", decode=2)
    actions = core.submit("one", num_prompt_tokens=LONG)
    (ahead,) = told_ahead(actions)
    core.step(replica_id=ahead.replica_id, load=load(num_running=9))
    other = {"b": "c", "c": "b"}[ahead.replica_id]
    assert sent(core.step(delta(sent(actions).attempt, 0, 5), replica_id="a")).replica_id == other


# --- by seconds ---

BYTES = 10_000
"""Of a token."""


def by_seconds(token_s: float = 1e-3, bytes_per_s: float = 1e9, num_running: int = 8, host: str = "") -> Core:
    """One replica that computes prompts, `a`, and one that decodes, `b`, with so many streams."""
    core = Core(RouterConfig(prefill_replicas=1, decode_replicas=1))
    for name in "ab":
        up(core, name, kv_bytes_per_token=BYTES)
        told = EngineStats(prefill_tokens_per_s=1 / token_s, received_bytes_per_s={"": 1e9, host: bytes_per_s})
        core.step(replica_id=name, stats=told, load=load(num_running=num_running if name == "b" else 0))
    return core


def goes_to(core: Core, num_tokens: int) -> str:
    return sent(core.submit(f"{num_tokens}", num_prompt_tokens=num_tokens)).replica_id


@pytest.mark.parametrize(
    ("changes", "num_tokens", "chosen"),
    [
        ({}, 2000, "a"),
        ({}, 5, "b"),  # to hand it on takes longer than to compute it
        ({"num_running": 0}, 2000, "b"),  # nobody would wait for it
        ({"bytes_per_s": 1e6}, 2000, "b"),  # moving takes longer than computing
        ({"bytes_per_s": 1e6, "host": "a"}, 2000, "b"),  # the same, from the host of a alone
        ({"bytes_per_s": 1e6, "host": "c"}, 2000, "a"),
        ({"token_s": 1e-6}, 2000, "b"),  # computing takes no time
    ],
)
def test_who_computes_a_prompt_is_decided_by_measured_seconds(changes, num_tokens, chosen):
    assert goes_to(by_seconds(**changes), num_tokens) == chosen


def test_a_queue_where_prompts_are_computed_leaves_them_where_they_are_decoded():
    core = by_seconds()
    core.step(replica_id="a", load=load(num_waiting=9, num_waiting_tokens=100_000))
    assert goes_to(core, 2000) == "b"


def test_a_prompt_that_is_cached_at_the_decoding_replica_stays_there():
    core = by_seconds()
    cached_on(core, "b")
    assert goes_to(core, LONG) == "b"


def test_what_others_have_cached_is_fetched_by_the_decoding_replica_where_that_is_sooner():
    core = by_seconds(num_running=1)
    cached_on(core, "a")
    first = sent(core.submit("one", num_prompt_tokens=LONG))
    assert (first.replica_id, first.request.block_source) == ("b", BlockSource("a:1", LONG - 1))


def test_what_handing_on_takes_is_measured_and_counts():
    core = by_seconds()
    roles = core.dispatch.registry.model("m").roles
    first = sent(core.submit("one", num_prompt_tokens=2000))
    moved = sent(core.step(delta(first.attempt, 0, 5), replica_id="a"))
    core.now += 100.0
    core.step(delta(moved.attempt, 1, 6), replica_id="b", load=load(num_running=8))
    assert roles.hand_on_s > 0.5
    assert goes_to(core, 2000) == "b", "it takes longer than the delay of all streams"
