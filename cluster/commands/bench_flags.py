"""Flags of `holdfast bench`, and the plan and sampling parameters made from them."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Group, Parameter

from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.cluster.bench.runs import Plan, Target
    from holdfast.cluster.bench.workload import Workload

_LOAD = Group.create_ordered("Load: arrival of requests")
_WORK = Group.create_ordered("Workload: prompts and outputs")
_RESULT = Group.create_ordered("Results")
_DEFAULT_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Flags for how requests arrive."""

    concurrency: Annotated[
        str | None,
        Parameter(group=_LOAD, help="closed loop: concurrent users; several, like 1,4,16: one run each [default: 8]"),
    ] = None
    rate: Annotated[
        str | None, Parameter(group=_LOAD, help="open loop: requests a second; several, like 1,2,4: a run each")
    ] = None
    arrivals: Annotated[str, Parameter(group=_LOAD, help="open loop: poisson, gamma or constant")] = "poisson"
    burstiness: Annotated[
        float, Parameter(group=_LOAD, help="shape of gamma arrivals: below 1 in bursts, above 1 more even")
    ] = 1.0
    agents: Annotated[
        int | None, Parameter(group=_LOAD, help="sessions of coding agents, all open at once, shaped like a trace")
    ] = None
    trace: Annotated[
        Path | None,
        Parameter(
            group=_LOAD, help="replay a .jsonl or .csv trace in the format of Mooncake, Azure, BurstGPT or Holdfast"
        ),
    ] = None
    trace_speed: Annotated[
        float, Parameter(group=_LOAD, help="speed-up of the replay; 2: twice as fast as the trace")
    ] = 1.0
    requests: Annotated[
        int | None,
        Parameter(
            group=_LOAD, help="number of sessions of each run; a session is one request, or all turns of a conversation"
        ),
    ] = None
    duration: Annotated[
        float | None,
        Parameter(group=_LOAD, help="seconds in which requests of a run begin [default: 30 without --requests]"),
    ] = None
    warmup: Annotated[int, Parameter(group=_LOAD, help="requests before the measurement, which do not count")] = 0
    timeout: Annotated[float, Parameter(group=_LOAD, help="seconds after which a request counts as failed")] = 600.0
    max_in_flight: Annotated[
        int, Parameter(group=_LOAD, help="open loop: maximum requests in flight; the wait for a slot counts as latency")
    ] = 4096


@dataclass(frozen=True, kw_only=True)
class WorkFlags:
    """Flags for the workload."""

    prompt_tokens: Annotated[
        str,
        Parameter(
            group=_WORK, help="N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA, exponential:MEAN"
        ),
    ] = "128"
    output_tokens: Annotated[str, Parameter(group=_WORK, help="output lengths, in the same forms")] = "64"
    prefixes: Annotated[
        int, Parameter(group=_WORK, help="number of shared prefixes; each first prompt begins with one")
    ] = 0
    prefix_tokens: Annotated[int, Parameter(group=_WORK, help="tokens of each shared prefix")] = 0
    turns: Annotated[
        int, Parameter(group=_WORK, help="turns of a conversation; each sends the whole conversation so far")
    ] = 1
    agent_scale: Annotated[
        float, Parameter(group=_WORK, help="factor on the lengths of --agents; 1: 256,000 tokens at most")
    ] = 1.0
    agent_pauses: Annotated[float, Parameter(group=_WORK, help="factor on the pauses of --agents")] = 1.0
    think: Annotated[float, Parameter(group=_WORK, help="seconds between an answer and the next turn")] = 0.0
    seed: Annotated[int, Parameter(group=_WORK, help="seed of lengths and arrivals")] = 0
    text_seed: Annotated[
        int | None, Parameter(group=_WORK, help="seed of the words; unset: a new one, so that no prefix is cached")
    ] = None
    sampling_temperature: Annotated[
        float, Parameter(name="--temperature", group=_WORK, help="sampling temperature")
    ] = 0.0
    stop_at_eos: Annotated[
        bool, Parameter(group=_WORK, negative=(), help="outputs may end early (do not send ignore_eos)")
    ] = False
    extra_body: Annotated[
        str | None,
        Parameter(group=_WORK, help="a JSON object of further sampling parameters, or fields of HTTP bodies"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """Flags for the results."""

    slo: Annotated[str | None, Parameter(group=_RESULT, help="goodput: limits like ttft=500ms,tpot=50ms,e2e=10s")] = (
        None
    )
    attainment: Annotated[
        float, Parameter(group=_RESULT, help="share of requests within the SLO at which a load passes")
    ] = 0.95
    find_max: Annotated[
        bool,
        Parameter(
            group=_RESULT,
            negative=(),
            help="search for the highest load within the SLO, beginning at --rate [default: 1]",
        ),
    ] = False
    max_tries: Annotated[int, Parameter(group=_RESULT, help="maximum runs of the search of --find-max")] = 12
    json: Annotated[Path | None, Parameter(group=_RESULT, help="file for the report, as JSON")] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        Parameter(group=_RESULT, help="send no load: compare two reports that --json has written"),
    ] = None


def plan_of(load: LoadFlags, work: WorkFlags, result: ResultFlags, target: "Target") -> "Plan":
    """Raises `ConfigurationError`, naming the flag."""
    from holdfast.cluster.bench.runs import Plan
    from holdfast.cluster.bench.summary import Slo
    from holdfast.cluster.bench.workload import Arrivals
    from holdfast.cluster.load_trace import read_trace

    _check(load, work, result, target)
    rates = () if load.rate is None else _numbers("rate", load.rate)
    users = () if load.concurrency is None else _numbers("concurrency", load.concurrency)
    if not rates and not users and load.trace is None and load.agents is None:
        rates, users = ((1.0,), ()) if result.find_max else ((), (8.0,))
    if result.find_max and len(rates) + len(users) > 1:
        raise ConfigurationError("--find-max: needs one --rate or --concurrency, which it begins with")
    is_endless = load.requests is None and load.duration is None and load.trace is None and load.agents is None
    return Plan(
        workload=_workload(work, is_of_agents=load.agents is not None),
        num_agents=load.agents,
        trace=None if load.trace is None else read_trace(load.trace),
        trace_speed=load.trace_speed,
        concurrency=tuple(map(int, users)),
        arrivals=tuple(Arrivals(rate=rate, process=load.arrivals, burstiness=load.burstiness) for rate in rates),
        num_sessions=load.requests,
        duration_s=_DEFAULT_S if is_endless else load.duration,
        warmup=load.warmup,
        think_s=work.think,
        timeout_s=load.timeout,
        max_in_flight=load.max_in_flight,
        slo=None if result.slo is None else Slo.parsed(result.slo),
        attainment=result.attainment,
        find_max=result.find_max,
        max_tries=result.max_tries,
        text_seed=time.time_ns() if work.text_seed is None else work.text_seed,
    )


def _workload(work: WorkFlags, *, is_of_agents: bool) -> "Workload":
    from holdfast.cluster.bench.agents import NUM_TURNS, AgentWorkload
    from holdfast.cluster.bench.workload import Lengths, Workload

    if is_of_agents:
        num_turns = work.turns if work.turns > 1 else NUM_TURNS
        return AgentWorkload.scaled(
            work.agent_scale, pause_scale=work.agent_pauses, num_turns=num_turns, seed=work.seed
        )
    return Workload(
        prompt_tokens=Lengths.parsed("prompt-tokens", work.prompt_tokens),
        output_tokens=Lengths.parsed("output-tokens", work.output_tokens),
        num_prefixes=work.prefixes,
        prefix_tokens=work.prefix_tokens,
        num_turns=work.turns,
        seed=work.seed,
    )


def _check(load: LoadFlags, work: WorkFlags, result: ResultFlags, target: "Target") -> None:
    given = [name for name in ("concurrency", "rate", "trace", "agents") if getattr(load, name) is not None]
    if len(given) > 1:
        raise ConfigurationError(f"{' and '.join(f'--{name}' for name in given)}: give one of these only")
    if result.find_max and (result.slo is None or load.trace is not None or load.agents is not None):
        raise ConfigurationError("--find-max: needs --slo, like ttft=500ms,tpot=50ms, and no --trace or --agents")
    if load.agents is not None and (load.requests, load.duration) != (None, None):
        raise ConfigurationError("--agents: has its own number of sessions, so it takes no --requests and --duration")
    for name, value, least in (
        ("requests", load.requests, 1),
        ("agents", load.agents, 1),
        ("warmup", load.warmup, 0),
        ("max-in-flight", load.max_in_flight, 1),
        ("max-tries", result.max_tries, 1),
        ("think", work.think, 0),
    ):
        if value is not None and not value >= least:
            raise ConfigurationError(f"--{name} {value}: must be at least {least}")
    for name, seconds in (("duration", load.duration), ("timeout", load.timeout)):
        if seconds is not None and not seconds > 0:
            raise ConfigurationError(f"--{name} {seconds}: must be above 0 seconds")
    if not 0 < result.attainment <= 1:
        raise ConfigurationError(f"--attainment {result.attainment}: must be above 0, and at most 1")
    for name, number in (("turns", work.turns), ("agents", load.agents)):
        if (number or 0) > (name == "turns") and not target.has_conversations:
            raise ConfigurationError(
                f"--{name} {number}: needs --protocol chat or holdfast-chat, not {target.protocol}"
            )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers of a comma-separated flag; those of users must be whole."""
    read = int if name == "concurrency" else float
    try:
        values = tuple(float(read(part)) for part in text.split(","))
    except ValueError:
        values = (0.0,)
    if not all(0 < value < float("inf") for value in values):
        raise ConfigurationError(f"--{name} {text}: must be numbers above 0 with commas in between, like 1,2,4")
    return values


def params_of(work: WorkFlags) -> dict[str, Any]:
    """Fields of each request's body that set how it samples."""
    params: dict[str, Any] = {"temperature": work.sampling_temperature} | (
        {} if work.stop_at_eos else {"ignore_eos": True}
    )
    if work.extra_body is None:
        return params
    try:
        extra = json.loads(work.extra_body)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigurationError(f"--extra-body {work.extra_body}: must be a JSON object")
    return params | extra
