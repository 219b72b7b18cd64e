"""Command `holdfast verify`: an audit of any OpenAI-compatible server, from outside.

It needs httpx and jsonschema, and nothing of what serves models: no torch, ray or grpc.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Group, Parameter

from holdfast.cluster.commands.verify_reference import reference_of
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.cluster.verify.audit import Audit
    from holdfast.cluster.verify.report import Report

_WHAT: Final = Group.create_ordered("What is checked")
_REPORT: Final = Group.create_ordered("Reports")
_WATCH: Final = Group.create_ordered("Watching")
_SECONDS: Final = 60


@dataclass(frozen=True, kw_only=True)
class WhatFlags:
    """Flags for the checks."""

    checks: Annotated[str, Parameter(group=_WHAT, help="names of checks, separated by commas [default: all]")] = ""
    budget: Annotated[
        str,
        Parameter(group=_WHAT, help="limits of the audit: requests=N,tokens=N,rate=N (requests per second),seconds=N"),
    ] = ""
    adapter: Annotated[
        tuple[str, ...], Parameter(group=_WHAT, help="name of an adapter; its answers must differ from the model's")
    ] = ()
    zero_adapter: Annotated[
        tuple[str, ...],
        Parameter(group=_WHAT, help="name of an adapter without effect; its answers must equal the model's"),
    ] = ()
    prompts: Annotated[int, Parameter(group=_WHAT, help="number of prompts of each check, 2 to 8")] = 4
    tokens: Annotated[int, Parameter(group=_WHAT, help="output tokens of most requests, 8 to 256")] = 24
    company: Annotated[
        int, Parameter(group=_WHAT, help="number of concurrent requests of the batch check, 2 to 64")
    ] = 8
    pause: Annotated[
        float, Parameter(group=_WHAT, help="seconds of the pause before requests are repeated once more")
    ] = 3.0
    reference: Annotated[
        str | None,
        Parameter(group=_WHAT, help="source of the reference perplexities: a file, a server's address, or a model"),
    ] = None
    write_reference: Annotated[
        Path | None,
        Parameter(group=_WHAT, help="file for the perplexities of --reference, or of this server without --reference"),
    ] = None
    tolerance: Annotated[
        float, Parameter(group=_WHAT, help="maximum relative difference of perplexities from the reference")
    ] = 0.02
    during: Annotated[
        str, Parameter(group=_WHAT, help="a shell command, such as a kill, run while streams are open")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Flags for the reports."""

    json: Annotated[Path | None, Parameter(group=_REPORT, help="write the report as JSON")] = None
    html: Annotated[Path | None, Parameter(group=_REPORT, help="write the report as one HTML file")] = None
    junit: Annotated[Path | None, Parameter(group=_REPORT, help="write the report as JUnit's XML")] = None
    fail_on: Annotated[
        str, Parameter(group=_REPORT, help="least severe finding that gives exit code 1: fault, difference or note")
    ] = "difference"


@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """Flags for audits that are repeated."""

    watch: Annotated[float, Parameter(group=_WATCH, help="minutes between audits; 0: audit once")] = 0.0
    keep_watching: Annotated[
        bool, Parameter(group=_WATCH, negative=(), help="continue after an audit with findings")
    ] = False
    metrics_file: Annotated[
        Path | None, Parameter(group=_WATCH, help="file for Prometheus gauges, for the textfile collector")
    ] = None
    metrics_port: Annotated[
        int | None, Parameter(group=_WATCH, help="port of Prometheus gauges on 127.0.0.1, at /metrics; 0: a free port")
    ] = None


_NO_WHAT: Final = WhatFlags()
_NO_REPORT: Final = ReportFlags()
_NO_WATCH: Final = WatchFlags()


def verify(
    url: Annotated[str, Parameter(help="http(s)://HOST:PORT; /v1 is added where there is no path")],
    /,
    *,
    model: Annotated[str, Parameter(help="name of the model on the server; unset: the server's first model")] = "",
    key: Annotated[str, Parameter(help="API key; other users of this machine can see it: --key-file hides it")] = "",
    key_file: Annotated[Path | None, Parameter(help="a file with the API key")] = None,
    what: Annotated[WhatFlags, Parameter(name="*")] = _NO_WHAT,
    result: Annotated[ReportFlags, Parameter(name="*")] = _NO_REPORT,
    repeat: Annotated[WatchFlags, Parameter(name="*")] = _NO_WATCH,
) -> int:
    """Audit an OpenAI-compatible server from outside: one answer to each request, semantics, streams, numbers.

    Exit code 1: something was found.
    """
    secret = key if key_file is None else _read(key_file, "--key-file").strip()
    _check(what, result, repeat)
    reference = reference_of(what.reference)
    with _exposed(repeat.metrics_port) as expose:
        return _repeated(url, model, secret, what, result, repeat, reference, expose)


def _repeated(
    url: str,
    model: str,
    secret: str,
    what: WhatFlags,
    result: ReportFlags,
    repeat: WatchFlags,
    reference: Mapping[str, Any] | None,
    expose: Callable[[str], None],
) -> int:
    while True:
        began_s = time.monotonic()
        report, measured, is_interrupted = asyncio.run(_audited(url, model, secret, what, reference))
        _write(report, measured if reference is None else reference, what, result, repeat)
        expose(report.as_metrics())
        if is_interrupted:
            from holdfast.cluster.commands.entry import EXIT_INTERRUPTED

            return EXIT_INTERRUPTED
        is_bad = report.fails(_kind(result.fail_on))
        if not repeat.watch or (is_bad and not repeat.keep_watching):
            return int(is_bad)
        time.sleep(max(0.0, repeat.watch * _SECONDS - (time.monotonic() - began_s)))


def _check(what: WhatFlags, result: ReportFlags, repeat: WatchFlags) -> None:
    """Raises `ConfigurationError`, also for packages that are missing."""
    try:
        from holdfast.cluster.verify.audit import ALL
        from holdfast.cluster.verify.transport import Budget
    except ModuleNotFoundError as missing:
        reason = f"holdfast verify needs {missing.name}: pip install 'holdfast[verify]'"
        raise ConfigurationError(reason) from None
    unknown = [name for name in filter(None, what.checks.split(",")) if name not in ALL]
    if unknown:
        raise ConfigurationError(f"--checks {unknown[0]}: no such check; there are {', '.join(ALL)}")
    bounds = (("prompts", what.prompts, 2, 8), ("tokens", what.tokens, 8, 256), ("company", what.company, 2, 64))
    for name, value, least, most in bounds:
        if not least <= value <= most:
            raise ConfigurationError(f"--{name} {value}: must be from {least} to {most}")
    for name, number in (("pause", what.pause), ("tolerance", what.tolerance), ("watch", repeat.watch)):
        if not 0 <= number < float("inf"):
            raise ConfigurationError(f"--{name} {number}: must be 0 or more")
    for path in (result.json, result.html, result.junit, repeat.metrics_file, what.write_reference):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path}: no such folder: {path.absolute().parent}")
    Budget.parsed(what.budget)
    _kind(result.fail_on)


@contextmanager
def _exposed(port: int | None) -> Iterator[Callable[[str], None]]:
    """Sets the text that a port of this machine answers with; without a port it does nothing."""
    from holdfast.cluster.verify.metrics_server import MetricsServer

    if port is None:
        yield lambda text: None
        return
    server = MetricsServer(port)
    print(f"metrics: http://127.0.0.1:{server.port}/metrics", file=sys.stderr)
    try:
        yield lambda text: setattr(server, "text", text)
    finally:
        server.close()


def _kind(name: str) -> Any:
    from holdfast.cluster.verify.finding import Kind

    try:
        return Kind(name)
    except ValueError:
        raise ConfigurationError(f"--fail-on {name}: must be {', '.join(Kind)}") from None


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag} {path}: cannot be read: {error}") from None


async def _audited(
    url: str, model: str, key: str, what: WhatFlags, reference: Mapping[str, Any] | None
) -> "tuple[Report, dict[str, Any], bool]":
    """Report, measured perplexities, and whether Ctrl-C has ended it early."""
    from holdfast.cluster.commands.cli import version
    from holdfast.cluster.verify.audit import ALL, Audit
    from holdfast.cluster.verify.report import Report
    from holdfast.cluster.verify.transport import Budget, Transport

    began_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    transport = Transport(url, key, Budget.parsed(what.budget))
    audit = Audit(
        subject=_subject(model, what, bool(key)),
        checks=what.checks.split(",") if what.checks else ALL,
        reference=reference,
        tolerance=what.tolerance,
        command=_command(what.during),
    )
    is_interrupted = False
    try:
        await _shown(audit, transport)
    except asyncio.CancelledError:  # Ctrl-C: completed checks are shown and written
        is_interrupted = True
    finally:
        await transport.close()
    spent = transport.budget.used_requests, transport.budget.used_tokens
    about = {"server": transport.base, "began_at": began_at, "version": version(), "secret": key}
    return Report.of(audit, spent=spent, **about), audit.measured, is_interrupted


def _subject(model: str, what: WhatFlags, has_key: bool) -> Any:
    from holdfast.cluster.verify.subject import Sizes, Subject

    sizes = Sizes(num_prompts=what.prompts, num_tokens=what.tokens, company=what.company, pause_s=what.pause)
    nonce = os.urandom(3).hex()
    return Subject(
        model=model,
        nonce=nonce,
        sizes=sizes,
        has_key=has_key,
        adapters=what.adapter,
        zero_adapters=what.zero_adapter,
    )


async def _shown(audit: "Audit", transport: Any) -> None:
    """Runs it, with the check that runs in the last line of a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not sys.stderr.isatty():
        await audit.run(transport)
        return
    with console.status("audit") as status:
        await audit.run(transport, lambda name: status.update(f"audit: {name}"))


def _command(line: str) -> Callable[[], bool] | None:
    """Begins the command at the first call; says whether it still runs."""
    if not line:
        return None
    running: list[subprocess.Popen[bytes]] = []

    def going_on() -> bool:
        if not running:
            running.append(subprocess.Popen(line, shell=True, stdin=subprocess.DEVNULL))
        return running[0].poll() is None

    return going_on


def _write(
    report: "Report", perplexities: Mapping[str, Any], what: WhatFlags, result: ReportFlags, repeat: WatchFlags
) -> None:
    import json

    from rich.console import Console

    from holdfast.cluster.verify.report import page, print_report, write

    print_report(Console() if sys.stdout.isatty() else Console(width=120), report)
    texts = (
        (result.json, report.as_json),
        (result.html, lambda: page(report)),
        (result.junit, report.as_junit),
        (repeat.metrics_file, report.as_metrics),
        (what.write_reference, lambda: json.dumps(perplexities, indent=1, ensure_ascii=False)),
    )
    for path, make in texts:
        if path is not None:
            write(path, make())
