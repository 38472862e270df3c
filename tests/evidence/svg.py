# SPDX-License-Identifier: Apache-2.0
"""Line plots as SVG text. No library, no network."""

from __future__ import annotations

import math
from html import escape

from findings import Plot

# Small enough that letters are readable on a phone; the names of the lines are below the picture.
WIDTH, HEIGHT = 420, 244
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 44
NAME, TITLE = 15, 26     # heights of a line's name, and of a title
OURS = ["#1b6ca8", "#c2410c", "#15803d", "#111827"]                                # of kvd's lines, which are thick
OTHERS = ["#7e22ce", "#a16207", "#0e7490", "#be185d", "#4b5563", "#4d7c0f", "#b91c1c", "#4338ca"]   # of all other lines
MOST = 7        # lines in one picture


def nice_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in the range."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    return f"{value:.4g}"


class Frame:
    """Maps data to positions in the picture."""

    def __init__(self, plot: Plot) -> None:
        points = [point for line in plot.series.values() for point in line]
        xs, ys = [p[0] for p in points] or [0, 1], [p[1] for p in points] or [0, 1]
        self.x0, self.x1 = plot.x_range or (min(xs), max(xs))
        self.y0, self.y1 = plot.y_range or (min(0, min(ys)), max(ys) * 1.05 or 1)
        if self.x1 == self.x0:
            self.x1 = self.x0 + 1
        if self.y1 == self.y0:
            self.y1 = self.y0 + 1

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def axes(plot: Plot, frame: Frame) -> list[str]:
    out = []
    for tick in nice_ticks(frame.y0, frame.y1):
        y = frame.y(tick)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in nice_ticks(frame.x0, frame.x1):
        x = frame.x(tick)
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(plot.x)}</text>')
    out.append(f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
               f'transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">{escape(plot.y)}</text>')
    return out


def is_ours(name: str) -> bool:
    return name.startswith("kvd")


def split(plot: Plot) -> list[Plot]:
    """Plots of at most MOST lines, on the same axes: kvd's lines in each, and some of the others."""
    ours = {name: points for name, points in plot.series.items() if is_ours(name)}
    others = [name for name in plot.series if name not in ours]
    room = MOST - len(ours)
    groups = [others[i:i + room] for i in range(0, len(others), room)] or [[]]
    whole = Frame(plot)
    return [Plot(plot.title + (f" ({i} of {len(groups)})" if len(groups) > 1 else ""), plot.x, plot.y,
                 ours | {name: plot.series[name] for name in group}, (whole.y0, whole.y1), (whole.x0, whole.x1))
            for i, group in enumerate(groups, 1)]


def looks(names: list[str]) -> dict[str, tuple[str, float]]:
    """The colour and the width of each line; no colour is used twice in a picture."""
    ours, others, thin = iter(OURS), iter(OTHERS), 1.3 if any(map(is_ours, names)) else 2
    return {name: (next(ours), 3.5) if is_ours(name) else (next(others), thin) for name in names}


def line(frame: Frame, index: int, name: str, points: list[tuple[float, ...]], look: tuple[str, float]) -> list[str]:
    colour, wide = look
    stroke = f'stroke="{colour}" stroke-width="{wide}"'
    path = " ".join(f"{frame.x(p[0]):.1f},{frame.y(p[1]):.1f}" for p in points)
    y = HEIGHT + NAME * index + 8
    out = [f'<polyline points="{path}" fill="none" {stroke}/>',
           f'<line x1="{LEFT}" x2="{LEFT + 18}" y1="{y - 4}" y2="{y - 4}" {stroke}/>'
           f'<text x="{LEFT + 24}" y="{y}">{escape(name)}</text>']
    for px, *span in (p for p in points if len(p) > 2):
        out.append(f'<line x1="{frame.x(px):.1f}" x2="{frame.x(px):.1f}" y1="{frame.y(span[1]):.1f}" '
                   f'y2="{frame.y(span[2]):.1f}" stroke="{colour}" stroke-opacity="0.35"/>')
    for px, py, *_ in points:
        out.append(f'<circle cx="{frame.x(px):.1f}" cy="{frame.y(py):.1f}" r="{1.5 + wide / 2}" fill="{colour}">'
                   f"<title>{escape(name)}: {number(px)}, {number(py)}</title></circle>")
    return out


def height(plot: Plot) -> int:
    return HEIGHT + NAME * len(plot.series)


def inside(plot: Plot) -> str:
    frame, look = Frame(plot), looks(list(plot.series))
    parts = axes(plot, frame)
    for index, name in reversed(list(enumerate(plot.series))):      # kvd's, which come first, lie above the others
        parts += line(frame, index, name, sorted(plot.series[name]), look[name])
    return "".join(parts)


def draw(plot: Plot) -> str:
    """The whole picture, with the title above it."""
    return (f'<figure><figcaption>{escape(plot.title)}</figcaption>'
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height(plot)}" '
            f'role="img" aria-label="{escape(plot.title)}">{inside(plot)}</svg></figure>')


def beside(titled: list[tuple[str, Plot]]) -> str:
    """A standalone picture with a row per plot, or per part into which a plot is split."""
    step, y, each = WIDTH + 10, 0, ""
    rows = [(title, split(plot)) for title, plot in titled]
    for title, plots in rows:
        each += f'<text x="10" y="{y + 16}" class="title">{escape(title)}</text>'
        each += "".join(f'<svg x="{step * i}" y="{y + TITLE}" width="{WIDTH}" height="{height(plot)}">{inside(plot)}</svg>'
                        for i, plot in enumerate(plots))
        y += TITLE + max(height(plot) for plot in plots) + 10
    width, tall = step * max(len(plots) for _, plots in rows), y
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" role="img">'
            "<style>text { font: 11px system-ui, sans-serif; fill: #334155 } .title { font-weight: 600 } "
            ".grid { stroke: #e2e8f0 }</style>"
            f'<rect width="{width}" height="{tall}" fill="#fff"/>{each}</svg>\n')
