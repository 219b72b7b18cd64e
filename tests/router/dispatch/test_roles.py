"""Roles of replicas: who computes long prompts, when a request is handed on, and what happens without one of them."""

from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.replica_state import Role
from holdfast.worker.request import BlockSource
from tests.router.core import Core, aborts, delta, sent
from tests.router.dispatch.test_block_sources import retire, up
from tests.router.dispatch.test_prefix_routing import cached_on

LONG = 641


def core_of(*names: str, prefill: int = 1, decode: int = 0) -> Core:
    core = Core(RouterConfig(prefill_replicas=prefill, decode_replicas=decode))
    for name in names:
        up(core, name)
    return core


def roles(core: Core) -> dict[str, Role]:
    return {replica.facts.replica_id: replica.role for replica in core.dispatch.registry}


def test_roles_go_by_the_order_of_ids():
    core = core_of("c", "a", "b", "d", prefill=1, decode=2)
    assert roles(core) == {"a": Role.PREFILL, "b": Role.DECODE, "c": Role.DECODE, "d": Role.BOTH}


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
