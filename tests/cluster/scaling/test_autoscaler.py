"""The autoscaler on figures by hand: up in time, down without flapping, to zero and back, within limits."""

import pytest
from pydantic import ValidationError

from holdfast.cluster.scaling.autoscaler import Autoscaler, Seen
from holdfast.cluster.scaling.demand_book import ScalingConfig
from holdfast.router.demand import ModelDemand, ReplicaDemand, merged

SLOTS = 10


class Model:
    """A model whose load is set by hand, and whose replicas serve as soon as they are wanted, or when told."""

    def __init__(self, num_replicas: int = 1, **settings: float) -> None:
        limits = {"max_replicas": 8, "target_ttft_s": 2.0, "startup_s": 10.0, "downscale_after_s": 60.0}
        self.core = Autoscaler(ScalingConfig(**(limits | settings)), SLOTS)
        self.now_s = 0.0
        self.wanted = self.serving = num_replicas
        self.running = self.queued = self.open = 0
        self.kv_use = self.wait_s = self.ttft_s = 0.0
        self.arrived = self.first_tokens = self.left = 0
        self.prefill_tokens = 0
        self.speed = 0.0
        self.starts_at_once = True

    def demand(self) -> ModelDemand:
        replicas = tuple(
            ReplicaDemand(
                replica_id=str(number),
                num_running=self.running // self.serving,
                num_waiting=0,
                num_waiting_tokens=0,
                kv_use=self.kv_use / self.serving,
                num_prefill_tokens=self.prefill_tokens // self.serving,
                prefill_tokens_per_s=self.speed,
            )
            for number in range(self.serving)
        )
        return ModelDemand(
            model="m",
            num_open=self.running + self.queued + self.open,
            num_queued=self.queued,
            num_queued_tokens=100 * self.queued,
            longest_wait_s=self.wait_s,
            num_arrived=self.arrived - self.left,
            num_left=self.left,
            num_first_tokens=self.first_tokens,
            ttft_s=self.ttft_s,
            replicas=replicas,
        )

    def run(self, seconds: int, *, tells: bool = True) -> list[int]:
        """What was decided in each second."""
        decided = []
        for _ in range(seconds):
            self.now_s += 1.0
            demand = self.demand() if tells else None
            self.wanted = self.core.decide(Seen(now_s=self.now_s, num_wanted=self.wanted, demand=demand)).num_replicas
            if self.starts_at_once:
                self.serving = self.wanted
            decided.append(self.wanted)
        return decided


def test_a_load_below_the_target_of_use_changes_nothing():
    model = Model()
    model.running = 6
    assert set(model.run(200)) == {1}


def test_running_load_above_the_target_of_use_brings_another():
    model = Model()
    model.running = 8
    assert model.run(10)[-1] == 2


def test_kv_blocks_count_as_load():
    model = Model()
    model.running, model.kv_use = 1, 0.9
    assert model.run(10)[-1] == 2


def test_time_for_prompts_counts_as_load():
    model = Model()
    model.running, model.speed = 1, 1000.0
    for _ in range(20):
        model.prefill_tokens += 900
        model.run(1)
    assert model.wanted == 2


def test_a_trend_counts_before_the_load_is_there():
    """At the moment of the decision the load is below the target of one replica's use."""
    model = Model(4)
    for _ in range(30):
        model.running += 1
        if model.run(1)[-1] == 5:
            break
    assert model.wanted == 5
    assert model.running / SLOTS < 4 * 0.7


def test_a_queue_brings_as_many_as_empty_it_within_a_start():
    """One replica serves a request a second, three come, and twenty wait: 3 + (20 + 2 * 10) / 10."""
    model = Model()
    model.starts_at_once = False
    for _ in range(60):
        model.arrived, model.first_tokens = model.arrived + 1, model.first_tokens + 1
        model.run(1)
    for _ in range(30):
        model.arrived, model.first_tokens = model.arrived + 3, model.first_tokens + 1
        model.run(1)
    assert model.wanted == 1
    model.queued = 20
    model.arrived, model.first_tokens = model.arrived + 3, model.first_tokens + 1
    assert 6 <= model.run(1)[-1] <= 8


def test_a_queue_that_is_gone_before_a_replica_would_serve_brings_none():
    model = Model()
    model.starts_at_once = False
    for _ in range(60):
        model.arrived, model.first_tokens = model.arrived + 2, model.first_tokens + 2
        model.run(1)
    for _ in range(40):
        model.arrived, model.first_tokens = model.arrived + 1, model.first_tokens + 1
        model.run(1)
    model.queued = 5
    model.arrived += 5
    assert model.run(1) == [1]


@pytest.mark.parametrize(("left_per_s", "expected"), [(0, 6), (2, 2)])
def test_who_has_left_before_the_first_token_is_no_load_to_come(left_per_s, expected):
    """A request a second is served, three come, and eight wait: 3 + (8 + 2 * 10) / 10. Where two leave: 1 + 8 / 10."""
    model = Model()
    model.starts_at_once = False
    for _ in range(60):
        model.arrived, model.first_tokens = model.arrived + 1, model.first_tokens + 1
        model.run(1)
    for _ in range(30):
        model.arrived, model.first_tokens = model.arrived + 3, model.first_tokens + 1
        model.left += left_per_s
        model.run(1)
    model.queued = 8
    assert model.run(1) == [expected]


def test_late_first_tokens_bring_one_at_a_time():
    model = Model()
    model.starts_at_once = False
    model.queued, model.ttft_s = 1, 5.0
    assert model.run(30)[-1] == 2
    model.serving = 2
    assert model.run(1) == [3]


def test_fewer_only_after_they_were_enough_for_the_whole_while():
    model = Model(4)
    model.running = 24
    model.run(100)
    assert model.wanted == 4
    model.running = 8
    decided = model.run(70)
    assert decided.index(2) >= 59
    assert decided[-1] == 2


def test_a_start_that_is_under_way_is_not_taken_back_but_not_waited_for_without_end():
    model = Model(1, downscale_after_s=5.0)
    model.starts_at_once = False
    model.running = 8
    model.run(10)
    assert model.wanted == 2
    model.running = 1
    assert set(model.run(25)) == {2}
    assert model.run(60)[-1] == 1


def test_a_load_around_the_edge_does_not_flap():
    model = Model(2, downscale_after_s=30.0)
    changes = 0
    for second in range(600):
        model.running = 6 if second // 20 % 2 else 9
        before = model.wanted
        changes += model.run(1)[-1] != before
    assert changes <= 1


def test_the_remaining_replicas_hold_the_load():
    model = Model(5)
    model.running = 20
    model.run(200)
    assert model.running / (model.wanted * SLOTS) <= 0.7


def test_limits_hold():
    model = Model(max_replicas=3, min_replicas=2)
    assert model.run(1) == [2]
    model.running = 90
    assert model.run(60)[-1] == 3


def test_an_idle_model_goes_to_zero_and_a_request_wakes_it():
    model = Model(min_replicas=0, zero_after_s=100.0)
    model.running = 1
    model.run(50)
    model.running = 0
    decided = model.run(110)
    assert 99 <= decided.index(0) <= 101
    assert set(model.run(50)) == {0}
    model.queued, model.starts_at_once = 3, False
    assert model.run(1) == [1]
    assert set(model.run(30)) == {1}, "one start is enough, however long it takes"


def test_an_idle_model_with_a_least_number_keeps_it():
    model = Model(3, min_replicas=1, zero_after_s=10.0)
    assert model.run(300)[-1] == 1


def test_without_figures_everything_stays():
    model = Model(4)
    model.running = 24
    model.run(100)
    assert set(model.run(300, tells=False)) == {4}


def test_the_time_of_a_start_is_learned():
    model = Model()
    model.starts_at_once = False
    model.running = 8
    model.run(40)
    assert model.wanted == 2
    before = model.core.startup_s
    model.serving = 2
    model.run(1)
    assert model.core.startup_s > before


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValidationError, match="max_replicas = 1 must be at least min_replicas = 2"):
        ScalingConfig(max_replicas=1, min_replicas=2)
    assert not ScalingConfig().is_on


def test_what_routers_see_adds_up():
    replica = ReplicaDemand(replica_id="a", num_running=1, num_waiting=0, num_waiting_tokens=0, kv_use=0.0)
    one = ModelDemand(model="m", num_open=2, num_queued=1, longest_wait_s=3.0, num_arrived=5, replicas=(replica,))
    two = ModelDemand(model="m", num_open=1, longest_wait_s=1.0, num_arrived=4, ttft_s=0.5, replicas=(replica,))
    both = merged("m", [one, two])
    assert (both.num_open, both.num_queued, both.num_arrived) == (3, 1, 9)
    assert (both.longest_wait_s, both.ttft_s, both.replicas) == (3.0, 0.5, (replica,))
