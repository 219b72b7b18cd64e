"""Display of an audit in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cluster.verify.finding import CheckResult, Finding, Kind
from holdfast.cluster.verify.report import Report

_STYLES = {Kind.FAULT: "bold red", Kind.DIFFERENCE: "yellow", Kind.NOTE: "blue"}


def print_report(console: Console, report: Report) -> None:
    """Prints a table of all checks, and each finding with its evidence."""
    table = Table(title=Text(f"{report.server}  {report.model}"), box=None, title_justify="left", pad_edge=False)
    for name, justify in (
        ("check", "left"),
        ("", "left"),
        ("compared", "right"),
        ("requests", "right"),
        ("s", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for result in report.results:
        table.add_row(
            result.name, _word(result), f"{result.num_compared}", f"{result.num_requests}", f"{result.seconds:.1f}"
        )
    console.print(table)
    for kind in Kind:
        for result in report.results:
            for finding in result.findings:
                if finding.kind is kind:
                    _print_finding(console, report, finding)
    counts = report.counts
    sums = ", ".join(f"{counts[kind]} {kind}{'s' if counts[kind] != 1 else ''}" for kind in Kind)
    cost = f"{report.num_requests} requests, {report.num_tokens} output tokens, {report.seconds:.1f} s"
    console.print(Text(f"{sums}; {cost}", style="bold"))


def _word(result: CheckResult) -> Text:
    if result.skipped:
        return Text(f"skipped: {result.skipped}", style="dim")
    return Text(result.worst.value, style=_STYLES[result.worst]) if result.worst else Text("ok", style="green")


def _print_finding(console: Console, report: Report, one: Finding) -> None:
    line = Text.assemble((f"{one.kind} ", _STYLES[one.kind]), (one.name, "bold"), f"  {one.about}")
    figures = [f"{one.num_seen} of {one.num_tried}"] if one.kind is not Kind.NOTE else []
    figures += [f"first at output token {one.first_token}"] if one.first_token is not None else []
    figures += [f"{one.gap:.3g} nats"] if one.gap is not None else []
    console.print(Text(report.without_secret(line.plain), spans=line.spans))
    rest = "; ".join(filter(None, [", ".join(figures), one.cause]))
    if rest and one.kind is not Kind.NOTE:
        console.print(Text(f"  {rest}", style="dim"))
    if one.evidence is not None and one.kind is not Kind.NOTE:
        console.print(Text(report.without_secret(f"  expected {one.evidence.expected[:100]!r}"), style="dim"))
        console.print(Text(report.without_secret(f"  found    {one.evidence.found[:100]!r}"), style="dim"))
