"""Capacity questions: loads are read and made up, served to the end, and the figures are those of arithmetic."""

import json
from dataclasses import asdict, replace

import pytest

from holdfast.cluster.commands.cli import run
from holdfast.cluster.load_trace import Arrival, made_up_trace, read_trace
from holdfast.cluster.simulate.capacity.capacity import CapacityResult, ClusterShape, Service, serve
from holdfast.cluster.simulate.capacity.capacity_report import percentile, read_step_costs
from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.policy import POLICIES
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.scheduler.step_time import StepCosts

STEP = StepCosts(base_s=0.01, decode_s=0.0, token_s=0.0, context_token_s=0.0)


def cluster(num_replicas: int, step_costs: StepCosts = STEP, **limits: int) -> ClusterShape:
    return ClusterShape(
        num_replicas=num_replicas,
        step_costs=step_costs,
        scheduler=SchedulerConfig(**limits),
        num_blocks=256,
        block_size=16,
        max_model_len=1024,
    )


def load(*arrivals: tuple[float, int, int]) -> list[Arrival]:
    return [
        Arrival(arrival_s=arrival_s, num_prompt_tokens=num_prompt, num_output_tokens=num_output)
        for arrival_s, num_prompt, num_output in arrivals
    ]


def test_replicas_for_prompts_keep_long_ones_from_streams():
    """As many replicas with roles, whose blocks go over a network of 10 Gbit/s: no stream waits for a long prompt."""
    costs = StepCosts(base_s=0.01, decode_s=0.0, token_s=0.001, context_token_s=0.0)
    shape = replace(cluster(2, costs, max_num_batched_tokens=128), kv_bytes_per_token=20_000, max_model_len=2048)
    arrivals = load(
        *[(0.1 * number, 16, 250) for number in range(6)], *[(1.0 + 0.5 * number, 200, 2) for number in range(3)]
    )
    config = RouterConfig(prefill_replicas=1, decode_replicas=1, prefill_tokens=100)
    mixed, apart = (serve(arrivals, shape, "prefix_aware", config=one) for one in (None, config))
    assert all(service.ttft_s is not None for service in (*mixed.services, *apart.services))
    pauses = [max(service.pause_s for service in result.services[:6]) for result in (mixed, apart)]
    assert pauses[0] > 0.13 > 0.05 > pauses[1]


def test_roles_follow_a_load_that_shifts():
    """Long prompts come from the 20th second on: at first streams wait for them, and then a replica computes them."""
    costs = StepCosts(base_s=0.01, decode_s=0.0, token_s=0.001, context_token_s=0.0)
    shape = replace(cluster(2, costs, max_num_batched_tokens=128), kv_bytes_per_token=20_000, max_model_len=2048)
    streams = [(0.7 * number, 16, 250) for number in range(85)]
    arrivals = load(*sorted([*streams, *[(20.0 + 0.4 * number, 200, 2) for number in range(100)]]))
    config = RouterConfig(max_prefill_replicas=1, decode_replicas=2, prefill_tokens=100)
    result = serve(arrivals, shape, "prefix_aware", config=config)
    assert all(service.ttft_s is not None for service in result.services)
    pauses = {
        one.arrival_s: service.pause_s
        for one, service in zip(arrivals, result.services, strict=True)
        if one.num_output_tokens == 250
    }
    assert max(pause for begins_s, pause in pauses.items() if 18 <= begins_s < 24) > 0.13
    assert max(pause for begins_s, pause in pauses.items() if begins_s >= 39) < 0.07


def test_a_lone_request_takes_a_step_for_each_token():
    result = serve(load((0.0, 100, 11)), cluster(1), "power_of_two")
    (service,) = result.services
    assert service.ttft_s == pytest.approx(0.01, abs=0.005)
    assert service.tpot_s == pytest.approx(0.01, rel=0.1)
    assert result.busy_s == [pytest.approx(0.11)]


def test_a_long_prompt_takes_several_steps():
    result = serve(load((0.0, 1000, 1)), cluster(1, max_num_batched_tokens=256), "power_of_two")
    assert result.busy_s == [pytest.approx(0.04)]


def test_a_step_costs_its_decodes_its_tokens_and_what_they_attend_to():
    costs = StepCosts(base_s=1.0, decode_s=0.001, token_s=0.1, context_token_s=0.01)
    result = serve(load((0.0, 10, 2)), cluster(1, costs), "power_of_two")
    prefill, decode = 1 + 0.1 * 10 + 0.01 * 55, 1 + 0.001 + 0.1 + 0.01 * 11
    assert result.busy_s == [pytest.approx(prefill + decode)]


@pytest.mark.parametrize("routing", POLICIES)
def test_every_policy_serves_the_whole_load(routing):
    trace = made_up_trace(rate=200, num_requests=200, mean_prompt=32, mean_output=16, max_len=512, seed=1)
    result = serve(trace, cluster(8), routing)
    assert all(service.ttft_s is not None for service in result.services)
    assert len(result.services) == 200
    assert min(result.busy_s) > 0


@pytest.mark.slow
def test_looking_at_the_load_balances_better_than_chance():
    trace = made_up_trace(rate=90, num_requests=400, mean_prompt=64, mean_output=32, max_len=512, seed=1)
    p99 = {}
    for routing in ("power_of_two", "random"):
        services = serve(trace, cluster(8, max_num_seqs=4), routing).services
        p99[routing] = percentile(sorted(service.ttft_s for service in services), 0.99)
    assert p99["power_of_two"] < p99["random"]


@pytest.mark.slow
def test_prompts_that_begin_alike_are_sent_to_where_their_prefix_is():
    trace = made_up_trace(
        rate=100, num_requests=300, mean_prompt=16, mean_output=8, max_len=1024, seed=1, num_prefixes=16, prefix_len=400
    )
    assert len({arrival.prompt_token_ids(number)[:400] for number, arrival in enumerate(trace)}) == 16
    model = StepCosts(base_s=0.002, decode_s=0.0, token_s=1e-4, context_token_s=0.0)
    by_prefix, by_load = (serve(trace, cluster(8, model), routing) for routing in ("prefix_aware", "power_of_two"))
    assert by_prefix.prefix_hit_rate > 0.8
    assert by_load.prefix_hit_rate < 0.7
    assert sum(by_prefix.busy_s) < sum(by_load.busy_s)


@pytest.mark.slow
def test_requests_go_to_where_their_adapter_is_resident():
    trace = made_up_trace(
        rate=60, num_requests=240, mean_prompt=64, mean_output=8, max_len=512, seed=1, num_adapters=24
    )
    shape = replace(cluster(4), max_loras=8, adapter_load_s=0.1)
    aware, blind = (serve(trace, shape, routing) for routing in ("prefix_aware", "power_of_two"))
    assert all(service.ttft_s is not None for result in (aware, blind) for service in result.services)
    assert aware.num_adapter_loads < 48
    assert blind.num_adapter_loads > 96


def test_an_adapter_is_loaded_once_and_the_others_find_it():
    arrivals = [replace(one, adapter=0) for one in load(*[(float(number), 8, 2) for number in range(6)])]
    result = serve(arrivals, replace(cluster(3), max_loras=1, adapter_load_s=0.3), "prefix_aware")
    assert result.num_adapter_loads == 1
    assert [round(service.ttft_s, 1) for service in result.services] == [0.3, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_prompts_without_a_prefix_have_nothing_in_common():
    result = serve(load((0.0, 100, 4), (0.5, 100, 4), (1.0, 100, 4)), cluster(1), "prefix_aware")
    assert result.prefix_hit_rate == 0


def test_goodput_counts_those_that_kept_to_both_limits():
    services = [
        Service(ttft_s=0.5, tpot_s=0.05),
        Service(ttft_s=2.0, tpot_s=0.05),
        Service(ttft_s=0.5, tpot_s=0.5),
        Service(ttft_s=None, tpot_s=None),
    ]
    result = CapacityResult(
        routing="any", services=services, rate=2.0, duration_s=2.0, busy_s=[1.0, 3.0], prefix_hit_rate=0.0
    )
    assert result.goodput(1.0, 0.1) == 0.5
    assert result.imbalance == 1.5


def test_a_trace_is_read_from_json_lines_and_from_csv(tmp_path):
    jsonl, csv = tmp_path / "load.jsonl", tmp_path / "load.csv"
    jsonl.write_text(
        '{"arrival_s": 2, "num_prompt_tokens": 5, "num_output_tokens": 6}\n\n'
        '{"arrival_s": 1.5, "num_prompt_tokens": 3, "num_output_tokens": 4}\n'
    )
    csv.write_text("arrival_s,num_prompt_tokens,num_output_tokens\n2,5,6\n1.5,3,4\n")
    assert read_trace(jsonl) == read_trace(csv) == load((1.5, 3, 4), (2.0, 5, 6))


def test_a_published_trace_is_read_with_its_hash_ids(tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_text('{"timestamp": 2500, "input_length": 1000, "output_length": 7, "hash_ids": [46, 47]}\n')
    (arrival,) = read_trace(path)
    assert (arrival.arrival_s, arrival.num_prompt_tokens, arrival.num_output_tokens) == (2.5, 1000, 7)
    one, other = arrival.prompt_token_ids(1), arrival.prompt_token_ids(2)
    assert one == other
    assert len(one) == 1000
    assert len(set(one[:512])) == len(set(one[512:])) == 1


@pytest.mark.parametrize("line", ["{}", "3", "nonsense", '{"arrival_s": 0, "num_prompt_tokens": 0}'])
def test_a_trace_that_cannot_be_read_says_where(tmp_path, line):
    path = tmp_path / "load.jsonl"
    path.write_text('{"arrival_s": 0, "num_prompt_tokens": 1, "num_output_tokens": 1}\n' + line)
    with pytest.raises(ConfigurationError, match="request 2"):
        read_trace(path)


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '{"base_s": 0}', '{"base_s": 1, "token_s": -1}', '{"base_s": 1, "token": 1}', "nonsense"]
)
def test_a_step_model_that_makes_no_sense_is_refused(tmp_path, text):
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="--step-model"):
        read_step_costs(path)


def test_the_command_prints_a_row_for_each_policy(tmp_path, capsys):
    (tmp_path / "step.json").write_text(json.dumps(asdict(STEP)))
    entry = {"arrival_s": 0.0, "num_prompt_tokens": 8, "num_output_tokens": 4}
    (tmp_path / "load.jsonl").write_text(json.dumps(entry))
    files = ["--trace", str(tmp_path / "load.jsonl"), "--step-model", str(tmp_path / "step.json")]
    assert run(["simulate", "--replicas", "2", *files]) == 0
    printed = capsys.readouterr().out
    assert all(routing in printed for routing in POLICIES.keys() - {"session_affinity"})
    assert run(["simulate", "--replicas", "2", *files, "--routing", "nearest"]) == 2
    assert run(["simulate", "--replicas", "2"]) == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "0"],
        ["--mean-output", "0"],
        ["--prefixes", "-1"],
        ["--prefixes", "2"],
        ["--prefix-len", "5"],
        ["--prefixes", "2", "--prefix-len", "2048"],
    ],
)
def test_a_load_that_cannot_be_made_up_is_refused_by_its_flag(tmp_path, capsys, flags):
    (tmp_path / "step.json").write_text(json.dumps(asdict(STEP)))
    assert run(["simulate", "--replicas", "2", "--step-model", str(tmp_path / "step.json"), *flags]) == 2
    assert flags[0] in capsys.readouterr().err or "--prefix-len" in flags
