"""Plots as SVG text: lines, steps and points on linear axes. They need no library, no script and no network.

What may not live here: what is plotted (`page.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Literal

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
            told = escape(f"{series.name} {label}: {x_value:.4g}, {y_value:.4g}")
            radius = 4 if series.labels else 2
            yield f'<circle class="{colour}" cx="{x}" cy="{y}" r="{radius}"><title>{told}</title></circle>'
            if label:
                yield f'<text x="{x + 6}" y="{y - 6}">{escape(label)}</text>'


def _mark(series: Series) -> str:
    return "●" if series.form == "points" else "╌╌" if series.is_dashed else "━━"
