"""How many replicas compute long prompts alone: by what they compute of them, soon up and late down."""

from dataclasses import dataclass, field

import pytest

from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.role_split import HOLD_S, LONG_TOKENS, Computed, RoleSplit
from holdfast.router.dispatch.roles import Role
from holdfast.worker.step_update import EngineStats
from tests.router.core import Core
from tests.router.dispatch.test_block_sources import up

SPEED = 1000.0
"""Prompt tokens a second of each replica."""


@dataclass
class Load:
    """Second by second: prompts that come, and what replicas compute of them."""

    split: RoleSplit
    num_replicas: int = 4
    now: float = 0.0
    computed: dict[str, int] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    """Decisions."""

    def pass_by(self, seconds: int, busy: float, long_share: float) -> int:
        """`busy` replicas compute prompts all the time, this share of their tokens long ones; the decision."""
        tokens = busy * SPEED
        for _ in range(seconds):
            self.now += 1.0
            if long_share:
                self.split.note_prompt(round(LONG_TOKENS * 4 * long_share), self.now)
            for _ in range(round(LONG_TOKENS * 4 * (1 - long_share) / 64)):
                self.split.note_prompt(64, self.now)
            for number in range(self.num_replicas):
                name = f"replica-{number}"
                self.computed[name] = self.computed.get(name, 5000) + round(tokens / self.num_replicas)
            self.split.look([Computed(name, count, SPEED) for name, count in self.computed.items()], self.now)
            self.numbers.append(self.split.number)
        return self.split.number


def test_short_prompts_alone_need_none():
    assert Load(RoleSplit(0, 3)).pass_by(120, busy=3.0, long_share=0.0) == 0


@pytest.mark.parametrize(("busy", "number"), [(0.1, 0), (0.5, 1), (1.2, 1), (1.6, 2), (2.6, 3), (6.0, 4)])
def test_the_number_is_that_which_the_long_prompts_would_keep_busy(busy, number):
    """Within 0.3 of a replica; half of them decode in any case."""
    assert Load(RoleSplit(0, 9), num_replicas=8).pass_by(200, busy, long_share=1.0) == number


def test_limits_hold():
    assert Load(RoleSplit(1, 2)).pass_by(200, busy=3.5, long_share=1.0) == 2
    assert Load(RoleSplit(1, 2)).pass_by(200, busy=0.0, long_share=0.0) == 1


def test_it_goes_up_within_seconds_and_down_after_the_hold():
    load = Load(RoleSplit(0, 3))
    assert load.pass_by(30, busy=1.0, long_share=0.0) == 0
    assert load.pass_by(40, busy=1.8, long_share=0.9) >= 1
    most = load.pass_by(60, busy=1.8, long_share=0.9)
    assert most == 2
    assert load.pass_by(round(HOLD_S) - 10, busy=1.0, long_share=0.0) == most
    assert load.pass_by(120, busy=1.0, long_share=0.0) == 0


def test_a_steady_load_changes_nothing():
    load = Load(RoleSplit(0, 3))
    load.pass_by(120, busy=1.4, long_share=0.8)
    before = len(load.numbers)
    load.pass_by(300, busy=1.4, long_share=0.8)
    assert len(set(load.numbers[before:])) == 1


def test_routers_that_get_parts_of_the_load_agree():
    whole, halves = Load(RoleSplit(0, 3)), [Load(RoleSplit(0, 3)) for _ in range(2)]
    for load in (whole, *halves):
        load.pass_by(100, busy=1.3, long_share=0.9)
    assert len({load.split.number for load in (whole, *halves)}) == 1


def test_a_replica_that_has_restarted_counts_anew():
    split = RoleSplit(0, 3)
    split.note_prompt(LONG_TOKENS, 0.0)
    for now, count in enumerate((10_000, 10_500, 100, 600)):
        split.look([Computed("a", count, SPEED)], float(now))
    assert split.load(3.0) == pytest.approx(2 * 0.5 / 20, rel=0.2)


def core(**router) -> Core:
    core = Core(RouterConfig(**router))
    for name in "abcd":
        up(core, name)
    return core


def roles(core: Core) -> list[Role]:
    return [replica.role for replica in core.dispatch.registry]


def submit_all(core: Core, num_tokens: int) -> None:
    """A prompt a second for a minute, of which each of four replicas computes a quarter."""
    for number in range(60):
        core.now += 1.0
        for replica in core.dispatch.registry:
            before = 0 if replica.stats is None else replica.stats.num_tokens_computed
            replica.stats = EngineStats(num_tokens_computed=before + num_tokens // 4, prefill_tokens_per_s=SPEED)
        core.submit(f"{num_tokens}-{core.now}-{number}", num_prompt_tokens=num_tokens)


def test_replicas_change_their_roles_with_the_prompts_that_come():
    one = core(max_prefill_replicas=3, decode_replicas=4)
    assert roles(one) == [Role.DECODE] * 4
    submit_all(one, 1500)
    assert roles(one) == [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    submit_all(one, 40)
    assert roles(one)[0] is Role.PREFILL, "it holds"
    submit_all(one, 40)
    assert roles(one) == [Role.DECODE] * 4


def test_without_a_maximum_the_number_is_fixed():
    one = core(prefill_replicas=1)
    submit_all(one, 1500)
    assert roles(one) == [Role.PREFILL, Role.BOTH, Role.BOTH, Role.BOTH]


def test_a_maximum_below_the_minimum_is_refused():
    with pytest.raises(ValueError, match="max_prefill_replicas = 1 must be at least prefill_replicas = 2"):
        RouterConfig(prefill_replicas=2, max_prefill_replicas=1)
