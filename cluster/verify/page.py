"""Page of an audit: one HTML file without anything from elsewhere, for sharing."""

import json
from html import escape
from typing import Final

from holdfast.cluster.verify.finding import CheckResult, Evidence, Finding, Kind
from holdfast.cluster.verify.report import Report

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
