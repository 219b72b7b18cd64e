"""Our copy of Serve's default policy decides as Serve's own source does."""

import random
from types import SimpleNamespace

import pytest
from ray.serve.autoscaling_policy import _apply_autoscaling_config, replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig

from benchmarks import serve_default
from benchmarks.serve_default import ServeDefault, ServeSettings


@pytest.mark.parametrize("factors", [{}, {"upscaling_factor": 0.4, "downscaling_factor": 0.3}])
@pytest.mark.parametrize("to_zero_s", [None, 20.0])
def test_it_decides_as_serve_does(factors, to_zero_s, monkeypatch):
    options = {"target_ongoing_requests": 3.0, "upscale_delay_s": 4.0, "downscale_delay_s": 9.0, **factors}
    options |= {"max_replicas": 12, "min_replicas": 0, "downscale_to_zero_delay_s": to_zero_s}
    theirs = _apply_autoscaling_config(replica_queue_length_autoscaling_policy)
    now_s = 0.0
    monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: now_s)
    ours, config, rng = ServeDefault(ServeSettings(**options)), AutoscalingConfig(**options), random.Random(7)
    state, wanted, seen = {}, 1, set()
    for _ in range(3000):
        now_s += rng.choice((0.5, 1.0, 3.0))
        ongoing = rng.choice((0.0, 0.0, wanted * 3.0, rng.uniform(0, 40)))
        running = rng.choice((wanted, wanted, max(0, wanted - 1)))
        context = SimpleNamespace(
            current_num_replicas=running,
            target_num_replicas=wanted,
            total_num_requests=ongoing,
            config=config,
            policy_state=dict(state),
        )
        expected, state = theirs(context)
        assert ours.target(ongoing, running, wanted, now_s) == expected
        wanted = min(max(expected, 0), 12)
        seen.add(wanted)
    assert len(seen) > 5


def test_its_defaults_are_serves():
    theirs = AutoscalingConfig()
    for name in ServeSettings.__dataclass_fields__:
        expected = getattr(theirs, name)
        assert getattr(ServeSettings(), name) == (1.0 if expected is None and name.endswith("factor") else expected)
    assert serve_default.ServeSettings().target_ongoing_requests == 2
