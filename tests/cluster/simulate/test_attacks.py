"""Attacks on simulated routers: bounded decoding keeps what an unbounded decoder breaks."""

import pytest

from holdfast.cluster.simulate.actors.loop_costs import UNBOUNDED
from holdfast.cluster.simulate.world import world
from holdfast.cluster.simulate.world.attacks import LARGE_FIELDS, LARGE_TEXTS, RESETS
from holdfast.cluster.simulate.world.scenario import draw_scenario
from holdfast.cluster.simulate.world.world import simulate

PAUSE, ENDED = "streams paused for", "ended 2 processes"


@pytest.mark.parametrize(
    ("seed", "kind", "broken"),
    [
        (11, LARGE_FIELDS, PAUSE),
        (63, LARGE_FIELDS, ENDED),
        (29, LARGE_TEXTS, PAUSE),
        (39, LARGE_TEXTS, ENDED),
        (21, RESETS, PAUSE),
    ],
)
def test_an_unbounded_decoder_breaks_a_promise_that_bounds_keep(seed, kind, broken, monkeypatch):
    drawn = draw_scenario(seed)
    assert drawn.is_calm, "nothing else may break it"
    assert drawn.attack.kind == kind, "seeds are drawn otherwise now: choose another seed of this kind"
    assert simulate(seed).failure is None
    monkeypatch.setattr(world, "COSTS", UNBOUNDED)
    failure = simulate(seed).failure
    assert failure is not None
    assert kind in str(failure.error)
    assert broken in str(failure.error)
