"""Autoscaling in the simulator: nothing is lost as replicas come and go, and ours misses less than Serve's default."""

import json

import pytest

from benchmarks.elastic_load import arrivals, burst, day, ramp, serve_elastic, spells
from benchmarks.scaling import LOADS, SHAPE, SLO_TTFT_S, compared, load
from holdfast.cluster.load_trace import Arrival, read_trace
from holdfast.cluster.scaling.autoscaler import Autoscaler
from holdfast.cluster.scaling.demand_book import ScalingConfig


def test_a_burst_misses_less_at_no_more_replica_hours():
    results = compared(load("burst", 400), ["ours", "serve"])
    ours, theirs = results["ours"], results["serve"]
    assert ours.num_lost == theirs.num_lost == 0
    assert ours.num_missed(SLO_TTFT_S) < theirs.num_missed(SLO_TTFT_S)
    assert ours.replica_s <= theirs.replica_s


@pytest.mark.slow
@pytest.mark.parametrize("other", ["serve", "serve 70 %"])
def test_over_all_loads_ours_misses_less_at_fewer_replica_hours(other):
    """Serve's defaults keep four times the replicas that slow changes need, so single loads may miss a request more."""
    missed, hours = {"ours": 0, other: 0}, {"ours": 0.0, other: 0.0}
    for name in LOADS:
        for policy, result in compared(load(name, 1200), ["ours", other]).items():
            assert result.num_lost == 0
            missed[policy] += result.num_missed(SLO_TTFT_S)
            hours[policy] += result.replica_s
    assert missed["ours"] < missed[other]
    assert hours["ours"] < hours[other]


def test_a_replayed_trace_is_served_whole(tmp_path):
    """Timestamps in milliseconds and published names, as recorded traces come."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * one.arrival_s,
            "input_length": one.num_prompt_tokens,
            "output_length": one.num_output_tokens,
        }
        for one in arrivals(spells(0.4, 3.5, 30, 90, seed=5), 3.5, 90, 100, 12, seed=2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(path)
    (result,) = compared(trace, ["ours"]).values()
    assert len(result.services) == len(lines)
    assert result.num_lost == 0


def test_a_model_at_rest_wakes_for_a_request_and_sleeps_again():
    settings = ScalingConfig(max_replicas=2, min_replicas=0, zero_after_s=30.0, startup_s=10.0)
    trace = [Arrival(arrival_s=0.0, num_prompt_tokens=50, num_output_tokens=4)]
    trace.append(Arrival(arrival_s=100.0, num_prompt_tokens=50, num_output_tokens=4))
    result = serve_elastic(trace, SHAPE, Autoscaler(settings, 8), startup_s=10.0, tail_s=60.0)
    assert [number for _, number, _ in result.changes] == [0, 1, 0]
    first, second = (one.ttft_s for one in result.services)
    assert first < 1.5 < 10.0 < second < 14.0


def test_a_cold_start_that_does_not_come_is_refused_in_time():
    settings = ScalingConfig(max_replicas=2, min_replicas=0, zero_after_s=5.0, startup_s=10.0)
    trace = [Arrival(arrival_s=at, num_prompt_tokens=50, num_output_tokens=4) for at in (0.0, 50.0, 51.0)]
    result = serve_elastic(trace, SHAPE, Autoscaler(settings, 8), startup_s=1e6, cold_start_wait_s=20.0)
    assert [one.ttft_s is None for one in result.services] == [False, True, True]


def test_loads_have_their_rates():
    for rate, expected in (
        (burst(1.0, 5.0, 100, 200), 1.0 * 300 + 5.0 * 100),
        (ramp(0.0, 4.0, 400), 2.0 * 400),
        (day(0.0, 4.0, 400), 2.0 * 400),
    ):
        assert len(arrivals(rate, 5.0, 400, 10, 10, seed=1)) == pytest.approx(expected, rel=0.15)
