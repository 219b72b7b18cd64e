"""The four measurements: tokens, requests, numbers of replicas, two routers."""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.gateway_parts.figures import Figures
from benchmarks.gateway_parts.systems import BARE, Programs, System, Systems
from benchmarks.router import SETTLE_S, Load

PER_TOKEN, PER_REQUEST, PER_S = "us of CPU per token", "us of CPU per request", "a second"
P50, P99, FAILED = "p50 ms", "p99 ms", "not answered"
ADDED_P50, ADDED_P99 = "p50 beyond bare", "p99 beyond bare"
CAPACITY = "capacity of one"
"""Tokens for each second of CPU, of all routers together, over those of the one alone."""
AT_ONCE: Final = "0"


def measure_tokens(arguments: argparse.Namespace, programs: Programs) -> Figures:
    """CPU per streamed token, of many streams in their middle."""
    load = Load(arguments.streams, arguments.steps_per_s, arguments.seconds)
    pace, figures = str(load.steps_per_s), Figures(PER_TOKEN, PER_S, beside=BARE, of=PER_TOKEN)
    with Systems("clients") as systems:
        bare = systems.add_bare(pace, load.tokens)
        systems.add_router(systems.start("replica", pace))
        systems.add_proxies(programs, bare)
        if programs.with_serve:
            systems.add_serve(pace)
        for number in range(arguments.rounds + 1):
            for system in systems:
                _stream([system], load, figures if number else None)
    return figures


def measure_routers(arguments: argparse.Namespace, programs: Programs) -> Figures:
    """Two routers that share replicas, each with as many streams as the one beside them."""
    load = Load(arguments.streams, arguments.steps_per_s, arguments.seconds)
    pace, figures = str(load.steps_per_s), Figures(PER_TOKEN, PER_S, CAPACITY)
    with Systems("clients") as systems:
        replicas = systems.start("replica", pace, "--replicas", "4")
        for name in ("alone", "one of two", "the other"):
            systems.add_router(replicas, name)
        alone, *two = systems.all
        for number in range(arguments.rounds + 1):
            for together in ([alone], two):
                _stream(together, load, figures if number else None)
            if number:
                one_us = figures.values[alone.name][PER_TOKEN][-1]
                each = [one_us / figures.values[system.name][PER_TOKEN][-1] for system in two]
                figures.note("two together", CAPACITY, sum(each))
    return figures


def _stream(systems: Sequence[System], load: Load, figures: Figures | None) -> None:
    """CPU per token in the middle of as many streams of each."""
    for system in systems:
        system.client.order("begin", streams=load.streams, tokens=load.tokens, repeats=1)
    time.sleep(SETTLE_S)
    before, began_s = [(one.cpu(), one.client.order("count")["tokens"]) for one in systems], time.monotonic()
    time.sleep(load.seconds)
    after, took_s = [(one.cpu(), one.client.order("count")["tokens"]) for one in systems], time.monotonic() - began_s
    for system in systems:
        system.client.order("finish")
    if figures is None:
        return
    for (cpu_before, tokens_before), (cpu_after, tokens_after), system in zip(before, after, systems, strict=True):
        num_tokens = tokens_after - tokens_before
        for name, cpu_s in cpu_after.items():
            figures.note(name, PER_TOKEN, 1e6 * (cpu_s - cpu_before[name]) / num_tokens)
        figures.note(system.name, PER_S, num_tokens / took_s)


def measure_requests(arguments: argparse.Namespace, programs: Programs) -> Figures:
    """CPU per request for one token, and latencies, at several rates."""
    figures = Figures(PER_REQUEST, P50, P99, ADDED_P50, ADDED_P99, FAILED)
    with Systems("arriving_clients") as systems:
        bare = systems.add_bare(AT_ONCE, 1)
        systems.add_router(systems.start("replica", AT_ONCE))
        systems.add_proxies(programs, bare)
        if programs.with_serve:
            systems.add_serve(AT_ONCE)
        _ask_all(systems, arguments, figures)
    return figures


def measure_replicas(arguments: argparse.Namespace, programs: Programs) -> Figures:
    """The same, by the number of replicas, which have prefixes cached that prompts begin with."""
    figures = Figures(PER_REQUEST, P50, P99, ADDED_P50, ADDED_P99, FAILED)
    with Systems("arriving_clients", "--prefixes", str(arguments.prefixes)) as systems:
        bare = systems.add_bare(AT_ONCE, 1)
        for size in arguments.sizes:
            replicas = systems.start("replica", AT_ONCE, "--replicas", str(size), "--prefixes", str(arguments.prefixes))
            systems.add_router(replicas, f"router, {size} replicas")
            systems.add_proxies(programs, bare, size, f", {size} replicas")
        _ask_all(systems, arguments, figures)
    return figures


def _ask_all(systems: Systems, arguments: argparse.Namespace, figures: Figures) -> None:
    for system in systems:
        _ask(system, 20, arguments.seconds, 0)  # what is made once is made
    for number in range(arguments.rounds):
        for rate in arguments.rates:
            bare = (0.0, 0.0)
            for system in systems:
                found = _note_asked(system, rate, arguments.seconds, number, figures)
                if system.name == BARE:
                    bare = found
                else:
                    for column, mine, its in zip((ADDED_P50, ADDED_P99), found, bare, strict=True):
                        figures.note(f"{system.name}, {rate:g}/s", column, mine - its)


def _note_asked(system: System, rate: float, seconds: float, seed: int, figures: Figures) -> tuple[float, float]:
    """The milliseconds that half of the requests, and 99 of 100, kept to."""
    latencies_s, num_failed, took = _ask(system, rate, seconds, seed)
    num_all = len(latencies_s) + num_failed
    for name, cpu_s in took.items():
        figures.note(f"{name}, {rate:g}/s", PER_REQUEST, 1e6 * cpu_s / num_all)
    row = f"{system.name}, {rate:g}/s"
    figures.note(row, FAILED, num_failed)
    if len(latencies_s) < 2:
        return math.nan, math.nan
    percentiles = statistics.quantiles(latencies_s, n=100, method="inclusive")
    p50, p99 = 1000 * percentiles[49], 1000 * percentiles[98]
    figures.note(row, P50, p50)
    figures.note(row, P99, p99)
    return p50, p99


def _ask(system: System, rate: float, seconds: float, seed: int) -> tuple[list[float], int, dict[str, float]]:
    """Latencies, how many were not answered, and the CPU seconds of its processes."""
    before = system.cpu()
    answer = system.client.order("run", rate=rate, seconds=max(seconds, 20 / rate), seed=seed)
    after = system.cpu()
    return answer["latencies_s"], answer["num_failed"], {name: after[name] - before[name] for name in after}
