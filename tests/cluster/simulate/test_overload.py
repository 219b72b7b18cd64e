"""More load than a cluster can serve, and a thousand replicas: what routers' decisions are worth, in virtual time."""

import pytest

from holdfast.cluster.load_trace import made_up_trace
from holdfast.cluster.simulate.capacity.capacity import CapacityResult, ClusterShape, serve
from holdfast.cluster.simulate.capacity.capacity_report import percentile
from holdfast.router.config import LimitsConfig, PolicyName, RouterConfig
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.scheduler.step_time import StepCosts

TTFT_S, TPOT_S = 1.0, 0.1
CAPACITY = 62
"""Requests a second that the two replicas can serve of this load."""
STEP = StepCosts(base_s=0.02, decode_s=0.0005, token_s=0.0001, context_token_s=1e-8)


def a_cluster(num_replicas: int, max_num_seqs: int) -> ClusterShape:
    return ClusterShape(
        num_replicas=num_replicas,
        step_costs=STEP,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        num_blocks=512,
        block_size=16,
        max_model_len=512,
    )


def under(times: float, max_ttft_s: float | None, seconds: int = 6) -> CapacityResult:
    """A load of so many times the capacity."""
    rate = times * CAPACITY
    num_requests = int(seconds * rate)
    trace = made_up_trace(rate=rate, num_requests=num_requests, mean_prompt=64, mean_output=8, max_len=512, seed=1)
    config = RouterConfig(max_ttft_s=max_ttft_s)
    return serve(trace, a_cluster(2, 8), "power_of_two", config=config, limits=LimitsConfig())


def goodput(result: CapacityResult) -> float:
    return result.goodput(TTFT_S, TPOT_S)


def test_goodput_under_twice_the_capacity_stays_near_its_peak():
    by_load = {times: goodput(under(times, TTFT_S)) for times in (0.8, 1.0, 2.0)}
    assert by_load[2.0] >= 0.9 * max(by_load.values()), by_load
    assert goodput(under(2.0, None)) < 0.5 * by_load[2.0], "this load would be served too late without a limit"


@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [0.3, 1.0, 3.0])
def test_goodput_stays_near_its_peak_for_other_limits_and_loads(limit_s: float):
    loads = (0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)
    by_load = {times: under(times, limit_s, seconds=12).goodput(limit_s, TPOT_S) for times in loads}
    assert all(by_load[times] >= 0.9 * max(by_load.values()) for times in (1.5, 2.0, 3.0, 5.0)), by_load


def test_below_the_capacity_a_limit_refuses_nobody():
    assert all(service.ttft_s is not None for service in under(0.8, TTFT_S).services)


def in_a_crowd(routing: PolicyName) -> CapacityResult:
    """A thousand replicas of one place each, at four fifths of what they can do. A prompt has one of forty prefixes."""
    trace = made_up_trace(
        rate=8000, num_requests=1200, mean_prompt=16, mean_output=4, max_len=512, seed=1, num_prefixes=40, prefix_len=64
    )
    return serve(trace, a_cluster(1000, 1), routing)


def p90_s(result: CapacityResult) -> float:
    return percentile(sorted(service.ttft_s or 0.0 for service in result.services), 0.9)


@pytest.mark.slow  # twenty seconds of one core; each policy has tests of its own
def test_policies_keep_their_promises_among_a_thousand_replicas():
    by_chance, by_load, by_prefix = (in_a_crowd(routing) for routing in ("random", "power_of_two", "prefix_aware"))
    for result in (by_chance, by_load, by_prefix):
        assert all(service.ttft_s is not None for service in result.services)
    assert p90_s(by_load) < 0.6 * p90_s(by_chance)
    assert by_prefix.prefix_hit_rate > 3 * by_load.prefix_hit_rate
    assert p90_s(by_prefix) < 0.8 * p90_s(by_chance)
