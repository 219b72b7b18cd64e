"""Page of a bench: one HTML file that needs nothing else, with tables and the plots that the field draws."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final, Literal

from holdfast.cluster.bench.display import METRICS, PERCENTILES, compared, differences, milliseconds, paired
from holdfast.cluster.bench.report import Distribution, Report, Run
from holdfast.worker.errors import ConfigurationError

_WIDTH: Final = 460
_HEIGHT: Final = 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 44
NUM_COLOURS: Final = 8
"""The page's style has so many classes `c0`, `c1`, ..."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `labels` are shown beside points, and all values where the pointer rests."""

    name: str
    points: Sequence[tuple[float, float]]
    form: Literal["line", "points", "line and points"] = "line"
    labels: Sequence[str] = ()
    colour: int = 0
    is_dashed: bool = False


def plot(title: str, x_label: str, y_label: str, every: Sequence[Series]) -> str:
    """One figure with its legend. Axes begin at 0."""
    shown = [series for series in every if series.points]
    xs = [x for series in shown for x, _ in series.points]
    ys = [y for series in shown for _, y in series.points]
    x_ticks, y_ticks = ticks(max(xs, default=1.0)), ticks(max(ys, default=1.0))
    frame = _Frame(x_ticks[-1], y_ticks[-1])
    parts = [
        *_axes(frame, x_ticks, y_ticks, x_label, y_label),
        *(part for one in shown for part in _series(frame, one)),
    ]
    name = escape(f"{title}: {y_label} against {x_label}")
    drawn = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    legend = "".join(
        f'<span class="c{one.colour % NUM_COLOURS}">{_mark(one)} {escape(one.name)}</span>' for one in shown
    )
    return f'<figure><figcaption>{escape(title)}</figcaption>{drawn}<div class="legend">{legend}</div></figure>'


def ticks(largest: float) -> list[float]:
    """Round values from 0 to the first that is not below `largest`: about five of them."""
    if not (math.isfinite(largest) and largest > 0):
        return [0.0, 1.0]
    raw = largest / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [index * step for index in range(math.ceil(largest / step - 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class _Frame:
    x_end: float
    y_end: float

    def x(self, value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.x_end, 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.y_end, 1)


def _axes(
    frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str
) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in y_ticks:
        y = frame.y(value)
        yield f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>'
    for value in x_ticks:
        x = frame.x(value)
        yield f'<line class="grid" x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'


def _series(frame: _Frame, series: Series) -> Iterator[str]:
    places = [(frame.x(x), frame.y(y)) for x, y in series.points]
    colour = f"c{series.colour % NUM_COLOURS}"
    if "line" in series.form:
        path = " ".join(f"{x},{y}" for x, y in places)
        dashes = ' stroke-dasharray="5 4"' if series.is_dashed else ""
        yield f'<polyline class="{colour}" points="{path}"{dashes}/>'
    if "points" in series.form:
        for index, ((x, y), (x_value, y_value)) in enumerate(zip(places, series.points, strict=True)):
            label = series.labels[index] if index < len(series.labels) else ""
            title = escape(f"{series.name} {label}: {x_value:.4g}, {y_value:.4g}")
            radius = 4 if series.labels else 2
            yield f'<circle class="{colour}" cx="{x}" cy="{y}" r="{radius}"><title>{title}</title></circle>'
            if label:
                yield f'<text x="{x + 6}" y="{y - 6}">{escape(label)}</text>'


def _mark(series: Series) -> str:
    return "●" if series.form == "points" else "╌╌" if series.is_dashed else "━━"


_STYLE: Final = """
:root{color-scheme:light dark;--text:#1c2024;--soft:#60646c;--line:#d9d9e0;--back:#fff;--c0:#0b68cb;--c1:#c2410c;
--c2:#15803d;--c3:#7c3aed;--c4:#b91c5c;--c5:#0e7490;--c6:#a16207;--c7:#475569}
@media (prefers-color-scheme:dark){:root{--text:#edeef0;--soft:#b0b4ba;--line:#363a3f;--back:#111113;--c0:#70b8ff;
--c1:#ff9a62;--c2:#5bd68a;--c3:#b9a3ff;--c4:#ff8dbb;--c5:#5ccfe6;--c6:#f0c85a;--c7:#a9b6c6}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--back);max-width:1000px;margin:2rem auto;
padding:0 1rem}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.5rem}p{color:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:.25rem .75rem;text-align:right;border-bottom:1px solid var(--line)}th:first-child,td:first-child{
text-align:left}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:1rem}
figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--line)}polyline{fill:none;stroke-width:2}.legend{display:flex;flex-wrap:wrap;gap:.25rem 1rem;
font-size:13px}
""" + "".join(
    f".legend .c{n}{{color:var(--c{n})}}polyline.c{n}{{stroke:var(--c{n})}}circle.c{n}{{fill:var(--c{n})}}"
    for n in range(8)
)


def write_page(path: Path, html: str) -> None:
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--html {path}: cannot be written ({error.strerror})") from error


def page(report: Report) -> str:
    """Of one report."""
    settings = report.settings
    lengths = f"{settings.prompt_tokens} prompt tokens, {settings.output_tokens} output tokens"
    what = f"trace {settings.trace}" if settings.trace else lengths
    head = (
        f"{settings.protocol} at {settings.server}, model {settings.model or 'the only one'}; {what}; {report.began_at}"
    )
    parts = [f"<p>{escape(head)}</p>", _overview(report.runs)]
    if report.search is not None:
        best = "none" if report.search.best is None else f"{report.search.best:.4g}"
        wanted = f"{settings.attainment_wanted:.0%} of requests within {settings.slo}"
        parts.append(f"<p>Highest {report.search.of} with {escape(wanted)}: <b>{best}</b></p>")
    parts.append(_plots(_across(report.runs)))
    for run in report.runs:
        parts += [f"<h2>{escape(str(run.load))}</h2>", _table(run), _errors(run), _plots(_over_time(run))]
    return _document("holdfast bench", parts)


def comparison_page(one: Report, other: Report, names: Sequence[str]) -> str:
    """Of two reports: runs of equal loads beside each other."""
    pairs = paired(one, other)
    parts = [f"<p>{escape(note)}</p>" for note in differences(one, other, names)]
    parts.append(_plots(_throughput([(name, report.runs) for name, report in zip(names, (one, other), strict=True)])))
    for first, second in pairs:
        parts += [f"<h2>{escape(str(first.load))}</h2>", _comparison(first, second, names)]
        parts.append(_plots(_curves([(names[0], first), (names[1], second)])))
    return _document(f"{names[0]} and {names[1]}", parts)


# --- plots ---


def _across(runs: Sequence[Run]) -> Iterator[str]:
    """Latency against throughput, if there are several runs; how latencies are distributed."""
    if len(runs) > 1:
        yield from _throughput([("", runs)])
    yield from _curves([(str(run.load), run) for run in runs])


def _throughput(groups: Sequence[tuple[str, Sequence[Run]]]) -> Iterator[str]:
    for title, name in METRICS:
        if name == "itl_s":
            continue
        every = []
        for colour, (group, runs) in enumerate(groups):
            ordered = sorted((run for run in runs if getattr(run, name) is not None), key=lambda run: run.load.level)
            labels = [f"{run.load.level:.3g}" for run in ordered]
            for share in ("p50", "p99"):
                points = [(run.output_tokens_per_s, 1000 * getattr(getattr(run, name), share)) for run in ordered]
                shown = f"{group} {share}".strip()
                dashed = share == "p99"
                every.append(Series(shown, points, "line and points", labels, colour, dashed))
        yield plot(f"{title} against throughput", "output tokens/s", f"{title}, ms", every)


def _curves(runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """Cumulative distributions."""
    for title, name in METRICS:
        every = []
        for colour, (label, run) in enumerate(runs):
            found: Distribution | None = getattr(run, name)
            if found is not None:
                points = [(1000 * value, float(rank)) for rank, value in enumerate(found.quantiles)]
                every.append(Series(label, points, "line", (), colour))
        yield plot(f"{title}, distribution", f"{title}, ms", "% of values", every)


def _over_time(run: Run) -> Iterator[str]:
    busy = [(moment.time_s, moment.in_flight) for moment in run.timeline]
    tokens = [(moment.time_s, moment.output_tokens_per_s) for moment in run.timeline]
    yield plot("Requests in flight", "s", "requests", [Series("in flight", busy)])
    yield plot("Throughput over time", "s", "output tokens/s", [Series("output tokens/s", tokens, colour=2)])
    first, last, failed = [], [], []
    for request in run.each_request:
        at = request.due_s
        if request.error is not None:
            failed.append((at, 0.0))
        elif request.first_s is not None and request.last_s is not None:
            first.append((at, 1000 * (request.first_s - request.due_s)))
            last.append((at, 1000 * (request.last_s - request.due_s)))
    errors = Series("failed", failed, "points", (), 4)
    yield plot("Time to first token over time", "s, when due", "TTFT, ms", [Series("TTFT", first, "points"), errors])
    yield plot("End-to-end over time", "s, when due", "e2e, ms", [Series("end-to-end", last, "points", (), 3), errors])


def _plots(drawn: Iterator[str]) -> str:
    return f'<div class="plots">{"".join(drawn)}</div>'


# --- tables ---


def _overview(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        ttft, tpot = (f"{milliseconds(d.p50)} / {milliseconds(d.p99)}" if d else "-" for d in (run.ttft_s, run.tpot_s))
        good = "-" if run.goodput is None else f"{run.goodput:.2f}"
        figures = (f"{run.requests_per_s:.2f}", f"{run.output_tokens_per_s:.1f}", ttft, tpot, good, str(run.failed))
        rows.append((str(run.load), *figures))
    head = ("load", "requests/s", "output tokens/s", "TTFT p50 / p99, ms", "TPOT p50 / p99, ms", "goodput/s", "failed")
    return _rows(head, rows)


def _table(run: Run) -> str:
    rows = []
    for title, name in (*METRICS, ("sent late", "lateness_s")):
        found: Distribution | None = getattr(run, name)
        if found is not None:
            rows.append((title, *(milliseconds(getattr(found, each)) for each in (*PERCENTILES, "max"))))
    return _rows(("ms", *PERCENTILES, "max"), rows)


def _errors(run: Run) -> str:
    rows = [(kind, str(number), run.error_examples.get(kind, "")[:200]) for kind, number in run.errors.items()]
    return _rows(("error", "requests", "the first one says"), rows) if rows else ""


def _comparison(one: Run, other: Run, names: Sequence[str]) -> str:
    rows = []
    for title, left, right, unit in compared(one, other):
        shown = [milliseconds(value) if unit == "ms" else f"{value:.4g}" for value in (left, right)]
        rows.append((title, *shown, f"{right / left:.2f}" if left else "-"))
    return _rows(("", *names, "ratio"), rows)


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _document(title: str, parts: Sequence[str]) -> str:
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"<head>{meta}<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    return f'<!doctype html><html lang="en">{head}<body><h1>{escape(title)}</h1>{"".join(parts)}</body></html>\n'
