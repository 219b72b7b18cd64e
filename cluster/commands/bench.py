"""Command `holdfast bench`: puts a load on any server, and reports latency and throughput as its clients see them."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from holdfast.cluster.commands.bench_flags import LoadFlags, ResultFlags, WorkFlags, params_of, plan_of
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.cluster.bench.report import Report, Settings
    from holdfast.cluster.bench.runs import Bench, Plan, Target
    from holdfast.cluster.bench.sender import Sender

_NO_LOAD: Final = LoadFlags()
_NO_WORK: Final = WorkFlags()
_NO_RESULT: Final = ResultFlags()


@takes_settings("client")
def bench(
    *,
    server: Annotated[
        str, Parameter(group=ESSENTIALS, help="HOST:PORT of holdfast's gRPC, http(s)://HOST:PORT, or oip://HOST:PORT")
    ] = "localhost:50051",
    protocol: Annotated[
        str | None,
        Parameter(
            group=ESSENTIALS,
            help="chat, completions, holdfast, holdfast-chat or oip [default: by the form of --server]",
        ),
    ] = None,
    model: Annotated[
        str, Parameter(group=ESSENTIALS, help="name of the model on the server; unset: the server's first model")
    ] = "",
    load: Annotated[LoadFlags, Parameter(name="*")] = _NO_LOAD,
    work: Annotated[WorkFlags, Parameter(name="*")] = _NO_WORK,
    result: Annotated[ResultFlags, Parameter(name="*")] = _NO_RESULT,
    settings: Layer,
) -> int:
    """Put a load on a server, ours or another's, and report what its clients would see.

    TTFT and end-to-end count from when a request was due, TPOT is of the tokens after the first. Examples: holdfast
    bench --concurrency 1,8,32; holdfast bench --server http://localhost:8000 --protocol chat --rate 4;
    holdfast bench --find-max --slo ttft=500ms,tpot=50ms
    """
    from rich.console import Console

    from holdfast.cluster.config.config import load_config

    console = Console() if sys.stdout.isatty() else Console(width=120)
    if result.compare is not None:
        return _compare(console, *result.compare)
    from holdfast.cluster.bench.display import print_report
    from holdfast.cluster.bench.runs import Target

    target = Target.parsed(server, protocol)
    plan = plan_of(load, work, result, target)
    if result.json is not None and not result.json.absolute().parent.is_dir():
        raise ConfigurationError(f"--json {result.json}: no such folder: {result.json.absolute().parent}")
    open_sender = partial(target.sender, model, params_of(work), **load_config(settings).config.client.options)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        report, is_interrupted = runner.run(_run(plan, target, open_sender, load.trace))
    print_report(console, report)
    if result.json is not None:
        report.write(result.json)
    if is_interrupted:
        from holdfast.cluster.commands.entry import EXIT_INTERRUPTED

        return EXIT_INTERRUPTED
    return 0 if any(run.completed for run in report.runs) else 1


async def _run(
    plan: "Plan", target: "Target", open_sender: Callable[[], "Awaitable[tuple[Sender, str]]"], trace: Path | None
) -> "tuple[Report, bool]":
    """The report, and whether Ctrl-C has ended it early."""
    from holdfast.cluster.bench.display import watch
    from holdfast.cluster.bench.report import Report
    from holdfast.cluster.bench.runs import Bench

    is_interrupted = False
    began_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sender, model = await open_sender()
    bench = Bench(plan, sender, watch)
    try:
        await bench.prepare()
        await bench.run()
    except asyncio.CancelledError:  # Ctrl-C: completed runs are shown and written
        if not bench.runs:
            raise
        is_interrupted = True
    finally:
        await sender.close()
    settings = _settings(plan, target, model, trace, bench)
    report = Report(began_at=began_at, machine=_machine(), settings=settings, runs=bench.runs, search=bench.search)
    return report, is_interrupted


def _settings(plan: "Plan", target: "Target", model: str, trace: Path | None, bench: "Bench") -> "Settings":
    """The settings of the run, for the report."""
    from holdfast.cluster.bench.agents import AgentWorkload
    from holdfast.cluster.bench.report import Settings

    work = plan.workload
    return Settings(
        server=target.server,
        protocol=target.protocol,
        model=model,
        prompt_tokens=str(work.prompt_tokens),
        output_tokens=str(work.output_tokens),
        prefixes=work.num_prefixes,
        prefix_tokens=work.prefix_tokens,
        turns=work.num_turns,
        think_s=plan.think_s,
        agent_pauses=work.pause_scale if isinstance(work, AgentWorkload) else None,
        trace=None if trace is None else trace.name,
        seed=work.seed,
        text_seed=plan.text_seed,
        warmup=plan.warmup,
        slo=None if plan.slo is None else str(plan.slo),
        attainment_wanted=plan.attainment,
        tokens_per_word=bench.calibration.tokens_per_word if bench.calibration.is_measured else None,
    )


def _loop_factory() -> Any:
    """uvloop, where it is: the load costs less of the machine."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _machine() -> Any:
    import platform

    from holdfast.cluster.bench.report import Machine
    from holdfast.cluster.commands.cli import version

    return Machine(
        cpus=os.cpu_count() or 1, load_average=os.getloadavg()[0], python=platform.python_version(), holdfast=version()
    )


def _compare(console: Any, one: Path, other: Path) -> int:
    from holdfast.cluster.bench.display import print_comparison
    from holdfast.cluster.bench.report import read_report

    reports = read_report(one), read_report(other)
    names = (one.stem, other.stem) if one.stem != other.stem else (str(one), str(other))
    print_comparison(console, *reports, names)
    return 0
