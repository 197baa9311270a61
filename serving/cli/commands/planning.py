"""`tableside plan`: how many ids find their row in a cache, by its size."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from tableside.loader.versions.states import attach_state
from tableside.serving.cli.arguments import AddCommand, add_json, count, microseconds, seconds, share, size
from tableside.serving.cli.output import console, errors, mb, print_json, progress_bar, published, table_of
from tableside.serving.errors import ServingError

if TYPE_CHECKING:  # reads data with pyarrow, which the other commands do without
    from tableside.loader.segment.segment import Segment
    from tableside.loader.versions.versions import Model
    from tableside.serving.planning.plan import CachePlan, Goals

_BAR = 40  # characters of a rate of 1
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 320, 60, 40  # of the axes, in pixels, and what lies before them
_COLOURS = ("#2563a8", "#b3261e", "#1c7c43", "#8a5a00", "#6b4fa0", "#0f7c8a", "#a03c78", "#5c6878")


def plan(options: argparse.Namespace) -> int:
    """Reads a data set, or samples what servers are asked for, and prints hit rates by size."""
    from tableside.serving.planning.plan import Goals
    from tableside.serving.planning.plan import plan as run

    if (options.data is None) == (options.live is None):
        raise ServingError(
            "expected either requests (a file or a folder) or --live SECONDS, which samples them"
        )
    if options.svg is not None and (options.svg.is_dir() or not options.svg.parent.is_dir()):
        raise ServingError(f"--svg is {options.svg}; expected a file in a folder that exists")
    model = published(options)
    segment = attach_state(model, None, "header")
    goals = Goals(options.sample, options.sizes, options.hit_rate, options.miss_us)
    if options.live is not None:
        found = _plan_live(model, segment, options.live, goals)
    else:
        with progress_bar("reading") as progress:
            found = run(segment, options.data, goals, batch_rows=options.batch, progress=progress)
    if options.json:
        print_json({"model": segment.header.model, **found.figures()})
    else:
        _print(segment.header.model, found)
    if options.svg is not None:  # last: where it cannot be written, the plan was printed
        options.svg.write_text(_svg(segment.header.model, found), encoding="utf-8")
    if options.hit_rate is not None and found.rate < options.hit_rate:
        errors.print(
            f"no size has {options.hit_rate:.1%}: the largest one has {found.rate:.1%}; the first use of an "
            "id never finds its row, so name larger --sizes, or more data"
        )
    return 0


def _plan_live(model: "Model", segment: "Segment", seconds: float, goals: "Goals") -> "CachePlan":
    from tableside.serving.planning.plan import plan_live
    from tableside.serving.service.uses import asking

    with asking(model.root, model.name, seconds) as asked:
        errors.print(
            f"sampling what servers of {model.root} are asked for of {model.name}, for {seconds:g} s"
        )
        asked.wait()
        samples = asked.read(segment.header.version, len(segment.header.features))
    try:
        return plan_live(segment, samples, seconds, goals)
    except ServingError as error:
        if (live := model.current()) == segment.header.version:
            raise
        raise ServingError(f"{error} version {live} became live meanwhile: ask again") from error


def _print(model: str, found: "CachePlan") -> None:
    said = found.figures()
    console.print(
        f"{said['rows']:,} requests, {said['ids']:,} ids, {said['ids_without_row']:,} of them without a "
        f"row; {said['sampled']:.2%} of the rows were sampled"
    )
    rows = (
        (
            mb(one["bytes"]) + (" *" if n == found.chosen else ""),
            *(f"{one[name]:.1%}" for name in ("lru", "lfu")),
            "█" * round(_BAR * max(one["lru"], one["lfu"])),
        )
        for n, one in enumerate(said["sizes"])
    )
    console.print(table_of(("cache", "LRU", "LFU", "ids that find their row"), rows))
    of_tables = (
        (
            *(one["name"], f"{one['ids'] / max(1, sum(t['ids'] for t in said['tables'])):.1%}"),
            *(f"{one['used_rows']:,}", mb(one["used_bytes"]), f"{one['hit_rates'][found.chosen]:.1%}"),
        )
        for one in said["tables"]
    )
    console.print(table_of(("table", "ids", "rows used", "bytes", "find their row (*)"), of_tables))
    console.print(
        f"one GiB more: {found.rate_of_more:.1%} instead of {found.rate:.1%}, {found.saved_us:,.3g} µs less "
        f"for a thousand ids (a miss takes {found.miss_us:g} µs: --miss-us)"
    )
    if found.setting == "host_cache":
        console.print(f"tableside serve {model} --host-cache {said['bytes']}  # {found.rate:.1%}")
    else:
        policy = f"--placement cached --hbm-budget {said['bytes']} --cache-policy {said['policy']}"
        console.print(f"tableside serve {model} {policy}  # {found.rate:.1%}")


def _svg(model: str, found: "CachePlan") -> str:
    """Returns the miss-ratio curves of all ids by LRU and LFU, and of each table by the better one: bytes of
    the cache from left to right, each step twice as many. A line stands at the chosen size."""
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
        _text(x, _TOP + _HEIGHT + 20, mb(size), "middle") for x, size in zip(across, sizes, strict=True)
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


def add_commands(command: AddCommand) -> None:
    p = command("plan", plan, "predict from requests how many ids hit a cache, by its size")
    p.sections["examples"] = (
        "  tableside plan ads clicks.parquet             # parts of all rows",
        "  tableside plan ads clicks/ --hit-rate 0.95    # the smallest that does",
        "  tableside plan ads --live 60                  # of what servers are asked",
    )
    p.option("model")
    p.option(
        "data",
        "requests: a .parquet or .jsonl file, or a folder of them, a column a feature",
        type=Path,
        nargs="?",
    )
    p.option(
        "--live", "instead of data: sample what running servers are asked for, so many seconds", type=seconds
    )
    p.option("--batch", "rows of the data that are looked up together", type=count(1), default=256)
    p.option("--sizes", "bytes, as 1GiB,4GiB (default: parts of all rows)", type=_sizes)
    told = "choose the smallest size with this share of ids (default: where twice the bytes gain a hundredth)"
    p.option("--hit-rate", told, type=share)
    p.option(
        "--miss-us", "microseconds of an id whose row is not there (default: as measured)", type=microseconds
    )
    p.option("--svg", "a file to draw the share of misses in, by the bytes", type=Path)
    p.option("--sample", "rows that are followed, about", type=count(1), default=1 << 18)
    add_json(p)


def _sizes(text: str) -> list[int]:
    return [size(one) for one in text.split(",")]
