"""Command `holdfast simulate`: the real decision code in virtual time, under random faults or under a load."""

import math
import os
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Group, Parameter

from holdfast.cluster.config.flags import ESSENTIALS
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.cluster.load_trace import Arrival
    from holdfast.cluster.simulate.capacity.capacity import ClusterShape

_FAULTS = Group.create_ordered("Faults")
_CAPACITY = Group.create_ordered("Capacity")
_LOAD = Group.create_ordered("Capacity: the load")
_SHAPE = Group.create_ordered("Capacity: each replica")


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Flags for the load: a trace, or a generated load."""

    trace: Annotated[
        Path | None, Parameter(group=_LOAD, help="trace to serve, .jsonl or .csv; unset: a synthetic load")
    ] = None
    rate: Annotated[
        tuple[float, ...],
        Parameter(group=_LOAD, negative=(), help="synthetic load: requests per second; several rates are compared"),
    ] = (10.0,)
    requests: Annotated[int, Parameter(group=_LOAD, help="synthetic load: number of requests")] = 1000
    mean_prompt: Annotated[int, Parameter(group=_LOAD, help="synthetic load: mean prompt tokens")] = 128
    mean_output: Annotated[int, Parameter(group=_LOAD, help="synthetic load: mean output tokens")] = 64
    prefixes: Annotated[
        int, Parameter(group=_LOAD, help="synthetic load: number of shared prefixes; each prompt begins with one")
    ] = 0
    prefix_len: Annotated[int, Parameter(group=_LOAD, help="synthetic load: tokens of each shared prefix")] = 0
    adapters: Annotated[
        int, Parameter(group=_LOAD, help="synthetic load: number of LoRA adapters; each request has one")
    ] = 0

    def loads(self, max_len: int) -> "list[list[Arrival]]":
        """Each in order of arrival. Raises `ConfigurationError`."""
        from holdfast.cluster.load_trace import read_trace

        if self.trace is not None:
            return [read_trace(self.trace)]
        for rate in self.rate:
            _require(0 < rate < math.inf, "rate", rate, "must be above 0")
        for name in ("requests", "mean_prompt", "mean_output"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be above 0")
        _require(self.prefixes >= 0, "prefixes", self.prefixes, "must not be below 0")
        limit = f"must be 1 to {max_len // 2 - 1} with --prefixes, half of --max-model-len, and else 0"
        is_possible = 0 < self.prefix_len < max_len // 2 if self.prefixes else self.prefix_len == 0
        _require(is_possible, "prefix_len", self.prefix_len, limit)
        _require(self.adapters >= 0, "adapters", self.adapters, "must not be below 0")
        return [self._made_up(rate, max_len) for rate in self.rate]

    def _made_up(self, rate: float, max_len: int) -> "list[Arrival]":
        from holdfast.cluster.load_trace import made_up_trace

        return made_up_trace(
            rate=rate,
            num_requests=self.requests,
            mean_prompt=self.mean_prompt,
            mean_output=self.mean_output,
            max_len=max_len,
            seed=0,
            num_prefixes=self.prefixes,
            prefix_len=self.prefix_len,
            num_adapters=self.adapters,
        )


@dataclass(frozen=True, kw_only=True)
class ShapeFlags:
    """Flags for the shape of each replica."""

    step_model: Annotated[
        Path | None, Parameter(group=_SHAPE, help="JSON from benchmarks.step_model: how long a step takes")
    ] = None
    max_num_seqs: Annotated[int, Parameter(group=_SHAPE, help="maximum sequences of one step")] = 64
    max_num_batched_tokens: Annotated[int, Parameter(group=_SHAPE, help="maximum tokens of one step")] = 512
    num_blocks: Annotated[int, Parameter(group=_SHAPE, help="blocks of the KV cache, of 16 tokens")] = 4096
    max_model_len: Annotated[int, Parameter(group=_SHAPE, help="longest prompt plus output in tokens")] = 4096
    max_loras: Annotated[int, Parameter(group=_SHAPE, help="maximum LoRA adapters in a replica's memory")] = 16
    adapter_load_s: Annotated[float, Parameter(group=_SHAPE, help="seconds that an adapter takes to load")] = 0.1

    def cluster(self, num_replicas: int) -> "ClusterShape":
        """A cluster of `num_replicas` such replicas. Raises `ConfigurationError`."""
        from holdfast.cluster.simulate.capacity.capacity import ClusterShape
        from holdfast.cluster.simulate.capacity.capacity_report import read_step_costs
        from holdfast.worker.config import SchedulerConfig

        _require(num_replicas >= 1, "replicas", num_replicas, "must be at least 1")
        _require(0 <= self.adapter_load_s < math.inf, "adapter_load_s", self.adapter_load_s, "must not be below 0")
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_blocks", "max_loras"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        _require(self.max_model_len >= 2, "max_model_len", self.max_model_len, "must be at least 2")
        if self.step_model is None:
            raise ConfigurationError("--replicas needs --step-model (python -m benchmarks.step_model writes one)")
        return ClusterShape(
            num_replicas=num_replicas,
            step_costs=read_step_costs(self.step_model),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens
            ),
            num_blocks=self.num_blocks,
            block_size=16,
            max_model_len=self.max_model_len,
            max_loras=self.max_loras,
            adapter_load_s=self.adapter_load_s,
        )


_DEFAULT_LOAD: Final = LoadFlags()
_DEFAULT_SHAPE: Final = ShapeFlags()


def simulate(
    *,
    seeds: Annotated[str, Parameter(group=ESSENTIALS, help="first:end, the seeds to simulate")] = "0:200",
    replay: Annotated[
        int | None, Parameter(group=_FAULTS, help="run this seed alone and print its last events")
    ] = None,
    last: Annotated[int, Parameter(group=_FAULTS, help="number of events that --replay prints")] = 40,
    jobs: Annotated[int, Parameter(group=_FAULTS, help="cores to use; 0 for all")] = 1,
    max_failures: Annotated[int, Parameter(group=_FAULTS, help="stop after this many failed seeds")] = 1,
    async_scheduling: Annotated[
        bool, Parameter(group=_FAULTS, negative=(), help="replicas plan a step while the previous one runs")
    ] = False,
    replicas: Annotated[
        int | None, Parameter(group=_CAPACITY, help="serve a load with this many replicas, without faults")
    ] = None,
    routing: Annotated[
        list[str] | None, Parameter(group=_CAPACITY, negative=(), help="policies to compare; default: all")
    ] = None,
    max_ttft_s: Annotated[
        float | None,
        Parameter(group=_CAPACITY, help="router.max_ttft_s of the simulated routers; unset: no request is refused"),
    ] = None,
    slo_ttft: Annotated[float, Parameter(group=_CAPACITY, help="goodput: seconds to the first token")] = 1.0,
    slo_tpot: Annotated[float, Parameter(group=_CAPACITY, help="goodput: seconds for each further token")] = 0.1,
    plot: Annotated[Path | None, Parameter(group=_CAPACITY, help="file for a plot, .png or .svg")] = None,
    load: Annotated[LoadFlags, Parameter(name="*")] = _DEFAULT_LOAD,
    shape: Annotated[ShapeFlags, Parameter(name="*")] = _DEFAULT_SHAPE,
) -> int:
    """Run routers and replicas in virtual time, break them, and check every client's tokens.

    The same seed always gives the same simulation; exit code 1 if an invariant was violated. With --replicas, nothing
    breaks: a load is served, and what its clients would see is printed for each routing policy.
    """
    if replicas is not None:
        _require(not async_scheduling, "async-scheduling", "with --replicas", "must not be: it is for simulated faults")
        cluster = shape.cluster(replicas)
        loads = load.loads(cluster.max_model_len)
        return _capacity(loads, cluster, routing, max_ttft_s, slo_ttft, slo_tpot, plot)
    if replay is not None:
        _require(last >= 0, "last", last, "must not be below 0")
        return _replay(replay, last, async_scheduling)
    _require(jobs >= 0, "jobs", jobs, "must be a number of cores, or 0 for all")
    _require(max_failures >= 1, "max_failures", max_failures, "must be at least 1")
    return _campaign(_range(seeds), jobs or os.cpu_count() or 1, max_failures, async_scheduling)


def _require(is_met: bool, name: str, value: object, limit: str) -> None:
    if not is_met:
        raise ConfigurationError(f"--{name.replace('_', '-')} {value}: {limit}")


def _range(seeds: str) -> range:
    first, _, end = seeds.partition(":")
    try:
        chosen = range(int(first), int(end))
    except ValueError:
        raise ConfigurationError(f"--seeds {seeds}: must be two numbers, like 0:200") from None
    if not chosen:
        raise ConfigurationError(f"--seeds {seeds}: the end must be above the first")
    return chosen


def _campaign(seeds: range, jobs: int, max_failures: int, async_scheduling: bool) -> int:
    from rich.console import Console

    from holdfast.cluster.progress_bars import progress
    from holdfast.cluster.simulate.world.campaign import print_campaign, run_campaign

    started_s = time.perf_counter()
    with progress(sys.stderr) as report:
        phase = f"simulating seeds {seeds.start} to {seeds.stop - 1}"
        report(phase, 0, len(seeds))
        campaign = run_campaign(
            seeds,
            jobs=jobs,
            max_failures=max_failures,
            async_scheduling=async_scheduling,
            on_done=lambda num: report(phase, num, len(seeds)),
        )
    print_campaign(Console(), campaign, time.perf_counter() - started_s)
    return 1 if campaign.failures else 0


def _replay(seed: int, num_events: int, async_scheduling: bool) -> int:
    from rich.console import Console

    from holdfast.cluster.simulate.world.campaign import replay

    return 1 if replay(Console(), seed, num_events, async_scheduling=async_scheduling).failure else 0


def _capacity(
    loads: "list[list[Arrival]]",
    shape: "ClusterShape",
    routing: list[str] | None,
    max_ttft_s: float | None,
    slo_ttft_s: float,
    slo_tpot_s: float,
    plot: Path | None,
) -> int:
    from rich.console import Console

    from holdfast.cluster.progress_bars import progress
    from holdfast.cluster.simulate.capacity.capacity import serve
    from holdfast.cluster.simulate.capacity.capacity_report import plot as draw
    from holdfast.cluster.simulate.capacity.capacity_report import print_results
    from holdfast.router.config import RouterConfig
    from holdfast.router.dispatch.policy import POLICIES

    _require(max_ttft_s is None or max_ttft_s > 0, "max_ttft_s", max_ttft_s, "must be above 0")
    config = RouterConfig(max_ttft_s=max_ttft_s)
    unknown = set(routing or ()) - POLICIES.keys()
    # Traces have no sessions: by session, their requests would go as by power of two choices.
    names = [name for name in POLICIES if name in (routing or POLICIES.keys() - {"session_affinity"})]
    if unknown:
        raise ConfigurationError(f"--routing {', '.join(sorted(unknown))}: must be among {', '.join(POLICIES)}")
    results = []
    with progress(sys.stderr) as report:
        for (number, load), name in product(enumerate(loads), names):
            phase, most = name if len(loads) == 1 else f"{name}, load {number + 1}", len(load)
            report(phase, 0, most)
            show = lambda num, phase=phase, most=most: report(phase, num, most)  # noqa: E731
            results.append(serve(load, shape, name, config=config, on_done=show))
    print_results(Console(), results, slo_ttft_s, slo_tpot_s)
    if plot is not None:
        draw(results, plot)
    return 0
