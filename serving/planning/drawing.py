"""Draws a plan's miss-ratio curves as SVG: of all ids by LRU and LFU, and of each table by the better one."""

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from tableside.serving.planning.plan import Plan

_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 320, 60, 40  # of the axes, in pixels, and what lies before them
_COLOURS = ("#2563a8", "#b3261e", "#1c7c43", "#8a5a00", "#6b4fa0", "#0f7c8a", "#a03c78", "#5c6878")


def svg(model: str, found: Plan, told: Callable[[float], str]) -> str:
    """Returns a file: bytes of the cache from left to right, each step twice as many, and the share of the
    ids that miss. A line stands at the chosen size. told: a number of bytes for people."""
    sizes = found.sizes
    curves = [("LRU", found.hit_rates(found.lru)), ("LFU", found.hit_rates(found.lfu))]
    curves += [(one["name"], one["hit_rates"]) for one in found.figures()["tables"]]
    across = [_across(size, sizes) for size in sizes]
    parts = [_text(_LEFT, 22, f"{model}: share of the ids that miss, by the bytes of the cache", "start")]
    for percent in range(0, 101, 25):
        y = _down(percent / 100)
        parts.append(f'<path d="M{_LEFT},{y:.1f}h{_WIDTH}" stroke="#ccc"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{percent} %", "end"))
    parts += [
        _text(x, _TOP + _HEIGHT + 20, told(size), "middle") for x, size in zip(across, sizes, strict=True)
    ]
    at = f"M{across[found.chosen]:.1f},{_TOP}v{_HEIGHT}"
    parts.append(f'<path d="{at}" stroke="#888" stroke-dasharray="4"/>')
    for n, (name, rates) in enumerate(curves):
        colour, y = _COLOURS[n % len(_COLOURS)], _TOP + 14 + 18 * n
        points = " ".join(f"{x:.1f},{_down(1 - rate):.1f}" for x, rate in zip(across, rates, strict=True))
        line = f'fill="none" stroke="{colour}" stroke-width="{1 if n > 1 else 2.5}"'
        parts.append(f'<polyline points="{points}" {line}/>')
        parts.append(f'<path d="M{_LEFT + _WIDTH + 16},{y - 4}h20" {line}/>')
        parts.append(_text(_LEFT + _WIDTH + 42, y, name, "start"))
    wide, high = _LEFT + _WIDTH + 240, max(_TOP + _HEIGHT + 40, _TOP + 18 * len(curves) + 20)
    box = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def _across(size: int, sizes: Sequence[int]) -> float:
    steps = math.log2(sizes[-1] / sizes[0])
    return _LEFT + (_WIDTH * math.log2(size / sizes[0]) / steps if steps else _WIDTH / 2)


def _down(share: float) -> float:
    return _TOP + _HEIGHT * (1 - share)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
