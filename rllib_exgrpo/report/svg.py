"""Charts as SVG text. Colours are CSS variables, so that a page can have a dark mode.

A chart is 360 units wide, which is a phone's width in pixels: text stays readable.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 34
_MAX_DOTS = 60
_LOG_FROM = 20.0  # largest over smallest x
_DASHES = ("", "5 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: for the reader.
        xs: (N,) rising.
        ys: (N,) NaN leaves a gap.
        low: (N,) lower end of the band around it, if it has one.
        high: (N,) upper end.
        color: index of the colour.
        dash: index of the dash pattern; 0 is a full line.
    """

    label: str
    xs: NDArray[np.float64]
    ys: NDArray[np.float64]
    low: NDArray[np.float64] | None = None
    high: NDArray[np.float64] | None = None
    color: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Point:
    """A point of a chart, with its interval.

    Attributes:
        label: for the reader.
        x: where it is.
        y: how high it is.
        low: lower end of its interval, NaN if it has none.
        high: upper end.
        color: index of the colour.
    """

    label: str
    x: float
    y: float
    low: float
    high: float
    color: int = 0


@dataclass(frozen=True)
class _Frame:
    """Maps data to the plane of a chart."""

    x_ticks: list[float]
    y_ticks: list[float]
    x_range: tuple[float, float]
    x_is_log: bool = False  # then ticks and range are powers of ten

    def x(self, value: float) -> float:
        low, high = self.x_range
        share = (value - low) / (high - low or 1)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return (
            HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)
        )

    def axes(self, x_label: str) -> Iterator[str]:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        for tick, label in zip(self.y_ticks, tick_labels(self.y_ticks), strict=True):
            y = self.y(tick)
            yield f'<path class="grid-line" d="M{_LEFT} {y:.1f}H{right}"/>'
            yield _text(_LEFT - 6, y + 4, label, "end")
        labels = (
            [format_number(10**tick) for tick in self.x_ticks]
            if self.x_is_log
            else tick_labels(self.x_ticks)
        )
        for tick, label in zip(self.x_ticks, labels, strict=True):
            if self.x_range[0] <= tick <= self.x_range[1]:
                yield _text(self.x(tick), bottom + 15, label, "middle")
        yield _text((_LEFT + right) / 2, HEIGHT - 4, x_label, "middle")


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns about `count` round numbers that enclose a range."""
    if not high > low:
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_labels(marks: Sequence[float]) -> list[str]:
    """Returns marks as text, with as many decimals as tell them apart."""
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    largest = max(map(abs, marks), default=0.0)
    if step < 1e-4 or largest >= 1e4:
        return [format_number(mark) for mark in marks]
    decimals = next(d for d in range(7) if math.isclose(round(step, d), step))
    return [f"{mark:,.{decimals}f}" for mark in marks]


def format_number(value: float) -> str:
    """Returns a number in few characters."""
    if math.isnan(value):
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if letter == "k" else size
            return f"{value / scale:.4g}{letter}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def line_chart(lines: Sequence[Line], x_label: str, title: str) -> str:
    """Draws lines with their bands; the y-axis starts at 0 where that is near.

    Args:
        lines: at least one.
        x_label: below the x-axis.
        title: for those who cannot see it.
    """
    finite = _finite(a for n in lines for a in (n.ys, n.low, n.high) if a is not None)
    frame = _Frame(
        _x_ticks([n.xs for n in lines]), _y_ticks(finite), _x_range(n.xs for n in lines)
    )
    bands = (_band(frame, n) for n in lines if n.low is not None)
    strokes = (part for n in lines for part in _stroke(frame, n))
    return _svg(title, [*frame.axes(x_label), *bands, *strokes])


def scatter(points: Sequence[Point], x_label: str, title: str) -> str:
    """Draws points with their intervals; x is logarithmic where it spans much.

    Args:
        points: at least one.
        x_label: below the x-axis.
        title: for those who cannot see it.
    """
    xs = np.array([point.x for point in points])
    is_log = bool(xs.min() > 0 and xs.max() / xs.min() >= _LOG_FROM)
    at = np.log10(xs) if is_log else xs
    margin = 0.05 * float(np.ptp(at)) or 0.5
    low, high = float(at.min()) - margin, float(at.max()) + margin
    frame = _Frame(
        _log_ticks(low, high) if is_log else ticks(low, high, count=5),
        _y_ticks(_finite(np.array([p.low, p.y, p.high]) for p in points)),
        (low, high),
        is_log,
    )
    marks = (
        _mark(frame, x, point) for x, point in zip(map(float, at), points, strict=True)
    )
    return _svg(title, [*frame.axes(x_label), *marks])


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns the logarithms of the powers of ten in a range, or of 1, 2, 5 times."""
    whole = range(math.floor(low), math.ceil(high) + 1)
    factors = (1,) if sum(low <= n <= high for n in whole) > 1 else (1, 2, 5)
    return [n + math.log10(factor) for n in whole for factor in factors]


def _mark(frame: _Frame, x: float, point: Point) -> str:
    pen = f"var(--c{point.color})"
    tip = f"{point.label}: {format_number(point.y)} at {format_number(point.x)}"
    left, top = frame.x(x), frame.y(point.y)
    interval = ""
    if not math.isnan(point.low):
        ends = f"M{left:.1f} {frame.y(point.low):.1f}V{frame.y(point.high):.1f}"
        interval = f'<path class="line" style="stroke:{pen}" d="{ends}"/>'
    return (
        f'{interval}<circle style="fill:{pen}" cx="{left:.1f}" cy="{top:.1f}" r="4">'
        f"<title>{escape(tip)}</title></circle>"
    )


def stacked_bars(
    xs: NDArray[np.float64], parts: dict[str, NDArray[np.float64]], x_label: str,
    title: str,
) -> str:  # fmt: skip
    """Draws a bar for each x, cut into parts.

    Args:
        xs: (N,) evenly spaced.
        parts: label to (N,) sizes; NaN counts as 0. The first is at the bottom.
        x_label: below the x-axis.
        title: for those who cannot see it.
    """
    sizes_KN = np.nan_to_num(np.array(list(parts.values())))
    tops_KN = np.cumsum(sizes_KN, axis=0)
    half = (xs[1] - xs[0]) / 2 if len(xs) > 1 else 0.5
    frame = _Frame(
        _x_ticks([xs]),
        ticks(0, float(tops_KN[-1].max())),
        (float(xs[0] - half), float(xs[-1] + half)),
    )
    rects = []
    for k, label in enumerate(parts):
        for x, top, size in zip(xs, tops_KN[k], sizes_KN[k], strict=True):
            if size > 0:
                left, right = frame.x(x - 0.92 * half), frame.x(x + 0.92 * half)
                tip = f"{label}: {format_number(size)}, {x_label} {format_number(x)}"
                rects.append(
                    _rect(left, frame.y(top), right, frame.y(top - size), k, 1.0, tip)
                )
    return _svg(title, [*frame.axes(x_label), *rects])


def heat_map(
    xs: NDArray[np.float64], rows: dict[str, NDArray[np.float64]], x_label: str,
    title: str,
) -> str:  # fmt: skip
    """Draws a row of cells for each series; the strongest colour is the largest value.

    Args:
        xs: (N,) evenly spaced.
        rows: label to (N,) shares from 0 to 1, the first at the bottom.
        x_label: below the x-axis.
        title: for those who cannot see it.
    """
    largest = max(float(np.nanmax(values)) for values in rows.values()) or 1.0
    half = (xs[1] - xs[0]) / 2 if len(xs) > 1 else 0.5
    frame = _Frame(
        _x_ticks([xs]), [], (float(xs[0] - half), float(xs[-1] + half))
    )  # fmt: skip
    height = (HEIGHT - _TOP - _BOTTOM) / len(rows)
    parts = list(frame.axes(x_label))
    for number, (label, values) in enumerate(rows.items()):
        bottom = HEIGHT - _BOTTOM - number * height
        parts.append(_text(_LEFT - 6, bottom - height / 2 + 4, label, "end"))
        for x, value in zip(xs, values, strict=True):
            if value > 0:
                tip = f"{label}: {100 * value:.1f} %, {x_label} {format_number(x)}"
                parts.append(
                    _rect(
                        frame.x(x - half), bottom - height, frame.x(x + half),
                        bottom - 1, 0, value / largest, tip,
                    )
                )  # fmt: skip
    return _svg(title, parts)


def thin(
    xs: NDArray[np.float64], ys: NDArray[np.float64], most: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Averages neighbours until at most so many points are left."""
    size = -(-len(xs) // most)
    if size <= 1:
        return xs, ys
    starts = np.arange(0, len(xs), size)
    known = ~np.isnan(ys)
    counts = np.add.reduceat(known.astype(float), starts)
    sums = np.add.reduceat(np.where(known, ys, 0.0), starts)
    means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    lengths = np.diff([*starts, len(xs)])
    return np.add.reduceat(xs, starts) / lengths, means


def _finite(arrays: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    values = np.concatenate([np.asarray(a, dtype=np.float64) for a in arrays])
    return values[np.isfinite(values)]


def _x_range(all_xs: Iterable[NDArray[np.float64]]) -> tuple[float, float]:
    xs = np.concatenate(list(all_xs))
    return float(xs.min()), float(xs.max())


def _x_ticks(all_xs: Sequence[NDArray[np.float64]]) -> list[float]:
    marks = ticks(*_x_range(all_xs), count=5)
    return [mark for mark in marks if mark == int(mark)]


def _y_ticks(values: NDArray[np.float64]) -> list[float]:
    low, high = (float(values.min()), float(values.max())) if len(values) else (0, 1)
    if 0 < low < 0.5 * high:
        low = 0.0
    return ticks(low, high)


def _stroke(frame: _Frame, line: Line) -> Iterator[str]:
    pen = f'style="stroke:var(--c{line.color})" stroke-dasharray="{_DASHES[line.dash]}"'
    known = np.isfinite(line.ys)
    points = [(frame.x(x), frame.y(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    commands, pen_is_down = [], False
    for (x, y), is_known in zip(points, known, strict=True):
        if is_known:
            commands.append(f"{'L' if pen_is_down else 'M'}{x:.1f} {y:.1f}")
        pen_is_down = bool(is_known)
    yield f'<path class="line" {pen} d="{"".join(commands)}"/>'
    if len(points) <= _MAX_DOTS:
        for i in np.flatnonzero(known):
            tip = f"{line.label}: {format_number(line.ys[i])} at {line.xs[i]:,.0f}"
            x, y = points[i]
            yield (
                f'<circle style="fill:var(--c{line.color})" cx="{x:.1f}" cy="{y:.1f}" '
                f'r="2.2"><title>{escape(tip)}</title></circle>'
            )


def _band(frame: _Frame, line: Line) -> str:
    assert line.low is not None and line.high is not None
    known = np.flatnonzero(np.isfinite(line.low) & np.isfinite(line.high))
    there = [f"{frame.x(line.xs[i]):.1f} {frame.y(line.high[i]):.1f}" for i in known]
    back = [f"{frame.x(line.xs[i]):.1f} {frame.y(line.low[i]):.1f}" for i in known]
    path = "M" + "L".join([*there, *back[::-1]]) + "Z" if there else ""
    return f'<path class="band" style="fill:var(--c{line.color})" d="{path}"/>'


def _rect(
    left: float, top: float, right: float, bottom: float, color: int, opacity: float,
    tip: str,
) -> str:  # fmt: skip
    return (
        f'<rect style="fill:var(--c{color})" fill-opacity="{opacity:.3g}" '
        f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
        f'height="{bottom - top:.1f}"><title>{escape(tip)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
