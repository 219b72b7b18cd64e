"""Display of a bench on a terminal: progress, a table of each run, a comparison of two reports."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table

from holdfast.cluster.bench.report import Distribution, Report, Run, Turns
from holdfast.cluster.bench.runs import OnChange

METRICS: Final = (
    ("TTFT", "ttft_s"),
    ("TPOT", "tpot_s"),
    ("inter-token", "itl_s"),
    ("end-to-end", "e2e_s"),
)
"""Label of each metric in the tables, and its name in the report."""
PERCENTILES: Final = ("mean", "p50", "p90", "p95", "p99")


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 1 else f"{1000 * seconds:.3g}"


@contextmanager
def watch(title: str, num_requests: int | None, duration_s: float | None) -> Iterator[OnChange]:
    """A bar on a terminal, and a line at the end elsewhere. On standard error."""
    began_s = time.monotonic()
    last = [0, 0]
    if not sys.stderr.isatty():

        def note(due: int, ended: int) -> None:
            last[:] = due, ended

        yield note
        _say(sys.stderr, f"{title}: {last[1]} requests in {time.monotonic() - began_s:.1f} s")
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(file=sys.stderr), refresh_per_second=5) as bars:
        task = bars.add_task(title, total=num_requests or duration_s, note="")

        def show(due: int, ended: int) -> None:
            done = ended if num_requests else min(time.monotonic() - began_s, duration_s or 0.0)
            bars.update(task, completed=done, note=f"{ended} done, {due - ended} in flight")

        yield show
        bars.update(task, completed=num_requests or duration_s)


def print_report(console: Console, report: Report) -> None:
    """Prints all loads of a report, and the server's own figures beside them."""
    settings = report.settings
    lengths = f"{settings.prompt_tokens} prompt and {settings.output_tokens} output tokens"
    what = f"trace {settings.trace}" if settings.trace else lengths
    console.print(f"{settings.protocol} at {settings.server}, model {settings.model or 'the only one'}: {what}")
    for run in report.runs:
        print_run(console, run)
    if report.search is not None:
        _print_search(console, report)


def print_run(console: Console, run: Run) -> None:
    """Prints one load: its counts, latencies and, for agents, its turns."""
    console.print()
    counted = f"{run.completed} requests in {run.duration_s:.1f} s" + (f", {run.failed} failed" if run.failed else "")
    console.print(f"[bold]{run.load}[/bold]: {counted}", highlight=False)
    if run.interrupted:
        console.print("Interrupted: requests in flight are not counted, so long answers are missing.", style="yellow")
    rates = f"{run.requests_per_s:.2f} requests/s, {run.output_tokens_per_s:.1f} output tokens/s"
    console.print(f"{rates}, {run.total_tokens_per_s:.1f} tokens/s with prompts", highlight=False)
    if run.goodput is not None and run.attainment is not None:
        console.print(f"goodput {run.goodput:.2f} requests/s: {run.attainment:.1%} within the SLO", highlight=False)
    table = Table("ms", *PERCENTILES, "max", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Distribution | None]] = [(title, getattr(run, name)) for title, name in METRICS]
    if run.turns is not None:
        rows[1:1] = [("  first turns", run.turns.first_ttft_s), ("  later turns", run.turns.later_ttft_s)]
    if _is_late(run):
        rows.append(("sent late", run.lateness_s))
    for title, found in rows:
        if found is not None:
            table.add_row(title, *(milliseconds(getattr(found, each)) for each in (*PERCENTILES, "max")))
    console.print(table)
    if run.turns is not None and run.turns.hit_rate is not None:
        kept = f"{run.turns.sessions_kept} of {run.turns.sessions} sessions found their last prompt at each turn"
        seen = "" if run.turns.seen_rate is None else f", {run.turns.seen_rate:.1%} were of the turn before"
        console.print(f"{run.turns.hit_rate:.1%} of prompt tokens cached{seen}; {kept}", highlight=False)
    for kind, number in run.errors.items():
        console.print(f"{number} x {kind}: {run.error_examples.get(kind, '')[:200]}", style="red", markup=False)
    if _is_late(run):
        console.print(
            "Requests were sent late: this machine, or --max-in-flight, holds the load up. Latencies count from when "
            "they were due, so they have that wait in them.",
            style="yellow",
        )


def _is_late(run: Run) -> bool:
    """Whether the load tool itself limits the result: it waits for a tenth of the time to the first token, and at least
    5 ms.
    """
    late, ttft = run.lateness_s, run.ttft_s
    return late is not None and late.p99 > max(0.005, 0.1 * (ttft.p50 if ttft is not None else 0.0))


def _print_search(console: Console, report: Report) -> None:
    search = report.search
    assert search is not None
    table = Table(search.of, "within the SLO", "", box=None, pad_edge=False)
    for one in search.tries:
        table.add_row(f"{one.load:.4g}", f"{one.attainment:.1%}", "fine" if one.is_fine else "too much")
    console.print()
    console.print(table)
    wanted = f"{report.settings.attainment_wanted:.0%} of requests within {report.settings.slo}"
    if search.best is None:
        console.print(f"[bold]No load that was tried has {wanted}[/bold]", highlight=False)
    else:
        unit = "requests/s" if search.of == "rate" else "at a time"
        console.print(f"[bold]Highest load with {wanted}: {search.best:.4g} {unit}[/bold]", highlight=False)


# --- two reports ---


def print_comparison(console: Console, one: Report, other: Report, names: Sequence[str]) -> None:
    """Runs of equal loads side by side, with the second as a ratio of the first."""
    pairs = paired(one, other)
    table = Table("load", "", *names, "ratio", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for first, second in pairs:
        for index, (title, left, right, unit) in enumerate(compared(first, second)):
            shown = [milliseconds(value) if unit == "ms" else f"{value:.4g}" for value in (left, right)]
            ratio = f"{right / left:.2f}" if left else "-"
            table.add_row(str(first.load) if index == 0 else "", title, *shown, ratio)
    console.print(table)
    for note in differences(one, other, names):
        console.print(note, style="yellow", markup=False)
    if not pairs:
        console.print("no load is in both reports")


def paired(one: Report, other: Report) -> list[tuple[Run, Run]]:
    """Runs of the same load; of two reports with a run each, these, whatever their loads."""
    if len(one.runs) == len(other.runs) == 1:
        return [(one.runs[0], other.runs[0])]
    by_load = {run.load.model_dump_json(): run for run in other.runs}
    keys = [(run, run.load.model_dump_json()) for run in one.runs]
    return [(run, by_load[key]) for run, key in keys if key in by_load]


def compared(one: Run, other: Run) -> Iterator[tuple[str, float, float, str]]:
    """(what, of the one, of the other, unit)."""
    yield "requests/s", one.requests_per_s, other.requests_per_s, ""
    yield "output tokens/s", one.output_tokens_per_s, other.output_tokens_per_s, ""
    if one.goodput is not None and other.goodput is not None:
        yield "goodput/s", one.goodput, other.goodput, ""
    for title, name in METRICS:
        left, right = getattr(one, name), getattr(other, name)
        if left is not None and right is not None:
            for share in ("p50", "p99"):
                yield f"{title} {share}, ms", getattr(left, share), getattr(right, share), "ms"
    if one.turns is not None and other.turns is not None:
        yield from _compared_turns(one.turns, other.turns)
    yield "failed", float(one.failed), float(other.failed), ""


def _compared_turns(one: Turns, other: Turns) -> Iterator[tuple[str, float, float, str]]:
    if one.hit_rate is not None and other.hit_rate is not None:
        yield "hit rate", one.hit_rate, other.hit_rate, ""
    for title, left, right in (
        ("first turns", one.first_ttft_s, other.first_ttft_s),
        ("later turns", one.later_ttft_s, other.later_ttft_s),
    ):
        if left is not None and right is not None:
            for share in ("p50", "p95"):
                yield f"TTFT of {title} {share}, ms", getattr(left, share), getattr(right, share), "ms"


def differences(one: Report, other: Report, names: Sequence[str]) -> Iterator[str]:
    """Settings that make two reports different questions."""
    left, right = one.settings.model_dump(), other.settings.model_dump()
    for name in left.keys() - {"server", "text_seed", "tokens_per_word", "model", "slo", "attainment_wanted"}:
        if left[name] != right[name]:
            yield f"the settings differ: {name} is {left[name]} in {names[0]}, {right[name]} in {names[1]}"


def _say(stream: TextIO, line: str) -> None:
    print(line, file=stream, flush=True)
