"""Report of an audit: JSON, JUnit's XML, Prometheus's text, a terminal's display, and a page, which is one HTML file
without anything from elsewhere, for sharing. None of them has a key.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cluster.verify.audit import Audit
from holdfast.cluster.verify.finding import CheckResult, Evidence, Finding, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An audit that is over, and where and when it was made."""

    server: str
    model: str
    began_at: str
    version: str
    seconds: float
    num_requests: int
    num_tokens: int
    results: tuple[CheckResult, ...]
    secret: str = ""
    """A text that is never written."""

    @classmethod
    def of(
        cls, audit: Audit, *, server: str, began_at: str, version: str, spent: tuple[int, int], secret: str
    ) -> "Report":
        """`spent`: requests, and output tokens."""
        return cls(
            server=server,
            model=audit.subject.model,
            began_at=began_at,
            version=version,
            seconds=audit.seconds,
            num_requests=spent[0],
            num_tokens=spent[1],
            results=tuple(audit.results),
            secret=secret,
        )

    @property
    def counts(self) -> Counter[Kind]:
        return Counter(one.kind for result in self.results for one in result.findings)

    @property
    def num_compared(self) -> int:
        return sum(result.num_compared for result in self.results)

    def fails(self, least: Kind) -> bool:
        """Whether there is a finding of this kind, or of a heavier one."""
        kinds = list(Kind)
        return any(kinds.index(kind) <= kinds.index(least) for kind in self.counts)

    def without_secret(self, text: str) -> str:
        return text.replace(self.secret, "[key]") if self.secret else text

    def as_json(self) -> str:
        """The report as JSON without the API key."""
        fields = {key: value for key, value in asdict(self).items() if key != "secret"}
        fields["counts"] = {kind.value: self.counts[kind] for kind in Kind}
        return self.without_secret(json.dumps(fields, indent=1, ensure_ascii=False))

    def as_junit(self) -> str:
        """Every check is a test case; faults and differences are its failures."""
        failed = sum(result.worst in (Kind.FAULT, Kind.DIFFERENCE) for result in self.results)
        skipped = sum(bool(result.skipped) for result in self.results)
        counts = {"tests": len(self.results), "failures": failed, "skipped": skipped}
        attributes = {"name": f"holdfast verify {self.server}", "time": f"{self.seconds:.3f}"}
        suite = ElementTree.Element("testsuite", attributes | {key: str(value) for key, value in counts.items()})
        for result in self.results:
            _add_case(suite, result)
        return self.without_secret(ElementTree.tostring(suite, encoding="unicode", xml_declaration=True))

    def as_metrics(self) -> str:
        """Gauges of the last audit."""
        lines = []
        labels = f'server="{_escaped(self.server)}",model="{_escaped(self.model)}"'
        gauges: Mapping[str, tuple[str, dict[str, float]]] = {
            "findings": ("Findings of the last audit.", {f',kind="{kind}"': self.counts[kind] for kind in Kind}),
            "compared": ("Answers that the last audit compared.", {"": self.num_compared}),
            "requests": ("Requests of the last audit.", {"": self.num_requests}),
            "seconds": ("Seconds that the last audit took.", {"": round(self.seconds, 3)}),
        }
        for name, (about, values) in gauges.items():
            lines += [f"# HELP holdfast_verify_{name} {about}", f"# TYPE holdfast_verify_{name} gauge"]
            lines += [f"holdfast_verify_{name}{{{labels}{more}}} {value}" for more, value in values.items()]
        return self.without_secret("\n".join(lines) + "\n")


def _add_case(suite: ElementTree.Element, result: CheckResult) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname="holdfast.verify", name=result.name, time=f"{result.seconds:.3f}"
    )
    for finding in result.findings:
        if finding.kind is not Kind.NOTE:
            failure = ElementTree.SubElement(case, "failure", type=finding.kind.value, message=_xml(finding.name))
            evidence = "" if finding.evidence is None else json.dumps(asdict(finding.evidence), ensure_ascii=False)
            failure.text = _xml(
                f"{finding.about} ({finding.num_seen} of {finding.num_tried}) {finding.cause}\n{evidence}"
            )
    if result.skipped:
        ElementTree.SubElement(case, "skipped", message=_xml(result.skipped))


def _xml(text: str) -> str:
    """The text without characters that XML does not have."""
    return "".join(one if one in "\n\t" or (one >= " " and one not in "\ufffe\uffff") else "?" for one in text)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def write(path: Path, text: str) -> None:
    """Replaces the file at once, so that a collector never reads half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8", errors="replace")
    part.replace(path)


def read_reference(text: str) -> dict[str, Any]:
    """Raises `ValueError` if it is no reference."""
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise ValueError("must be an object of objects, as --write-reference writes it")
    return found


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


_STYLE: Final = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1c1e21;--soft:#666d75;--line:#e4e5e2;--ok:#1a7f4b;--fault:#c0322b;--difference:#b26a00;
--note:#4a6fa5}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8e9ea;--soft:#9aa1a9;--line:#30343a;--ok:#4cc38a;
--fault:#f2726b;--difference:#e5a54b;--note:#8fb0dd}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:980px;margin:0 auto;padding:40px 24px}h1{font-size:26px;margin:0 0 4px}.soft{color:var(--soft)}
.sums{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:12px;margin:24px 0}
.sum,.check{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.sum b{display:block;font-size:24px;font-variant-numeric:tabular-nums}.check{margin:10px 0}
.check h2{font-size:16px;margin:0;display:flex;gap:10px;align-items:baseline}
.check h2 small{margin-left:auto;font-weight:400}
.finding{border-top:1px solid var(--line);margin-top:12px;padding-top:12px}.finding p{margin:4px 0}
.tag{font-size:12px;border-radius:99px;padding:1px 9px;border:1px solid currentColor}
.ok{color:var(--ok)}.fault{color:var(--fault)}.difference{color:var(--difference)}.note{color:var(--note)}
code,pre{font:12.5px/1.45 ui-monospace,monospace}pre{background:var(--bg);border:1px solid var(--line);
border-radius:8px;padding:10px;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0 10px}
summary{cursor:pointer;color:var(--soft)}
"""


def page(report: Report) -> str:
    """The report as one HTML page, which loads nothing from elsewhere."""
    counts = report.counts
    bad = counts[Kind.FAULT] + counts[Kind.DIFFERENCE]
    verdict = "Nothing was found" if not bad else f"{bad} finding{'s' if bad > 1 else ''}"
    sums = [
        ("Faults", counts[Kind.FAULT], "fault" if counts[Kind.FAULT] else "ok"),
        ("Differences", counts[Kind.DIFFERENCE], "difference" if counts[Kind.DIFFERENCE] else "ok"),
        ("Notes", counts[Kind.NOTE], "note"),
        ("Answers compared", f"{report.num_compared:,}", ""),
        ("Requests", f"{report.num_requests:,}", ""),
        ("Seconds", f"{report.seconds:.1f}", ""),
    ]
    cells = "".join(f'<div class=sum><b class="{kind}">{value}</b>{name}</div>' for name, value, kind in sums)
    checks = "".join(_check(result) for result in report.results)
    return report.without_secret(
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Audit of {escape(report.server)}</title><style>{_STYLE}</style><main>"
        f"<h1 class={'fault' if counts[Kind.FAULT] else 'difference' if bad else 'ok'}>{verdict}</h1>"
        f"<div>Audit of <b>{escape(report.server)}</b>, model <b>{escape(report.model)}</b></div>"
        f"<div class=soft>{escape(report.began_at)}, holdfast verify {escape(report.version)}</div>"
        f"<div class=sums>{cells}</div>{checks}</main></html>\n"
    )


def _check(result: CheckResult) -> str:
    kind = result.worst
    word = "skipped" if result.skipped else kind.value if kind else "ok"
    style = "soft" if result.skipped else kind.value if kind else "ok"
    skipped = f"<p class=soft>{escape(result.skipped)}</p>" if result.skipped else ""
    findings = "".join(_finding(one) for one in sorted(result.findings, key=lambda one: list(Kind).index(one.kind)))
    figures = f"{result.num_compared} compared, {result.num_requests} requests, {result.seconds:.1f} s"
    title = f"{escape(result.name)}<span class='tag {style}'>{word}</span><small class=soft>{figures}</small>"
    return f"<section class=check><h2>{title}</h2>{skipped}{findings}</section>"


def _finding(one: Finding) -> str:
    figures = [f"{one.num_seen} of {one.num_tried}"] if one.kind is not Kind.NOTE else []
    figures += [f"first at output token {one.first_token}"] if one.first_token is not None else []
    figures += [f"{one.gap:.3g} nats"] if one.gap is not None else []
    cause = f"<p>Likely cause: {escape(one.cause)}</p>" if one.cause else ""
    figures_line = f"<p class=soft>{escape(', '.join(figures))}</p>" if figures else ""
    evidence = "" if one.evidence is None else _evidence(one.evidence)
    head = f"<p><span class='tag {one.kind}'>{one.kind}</span> <code>{escape(one.name)}</code></p>"
    return f"<div class=finding>{head}<p>{escape(one.about)}</p>{figures_line}{cause}{evidence}</div>"


def _evidence(one: Evidence) -> str:
    request = json.dumps(one.request, ensure_ascii=False, indent=1)
    parts = (("Request", f"POST {one.path}\n{request}"), ("Expected", one.expected), ("Found", one.found))
    shown = "".join(f"<div class=soft>{name}</div><pre>{escape(text)}</pre>" for name, text in parts if text)
    return f"<details><summary>The request that shows it</summary>{shown}</details>"
