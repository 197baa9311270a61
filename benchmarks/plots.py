"""Draws the result files as SVG files under docs/images, which README.md and docs/ show.

    python benchmarks/plots.py            # or: make plots

Every plot is drawn from the fields of result files alone. The same results give the same bytes with the same
matplotlib, as there is no date and identifiers are fixed. Each file holds the hash of what was drawn
(`hash_of`), so that a test finds a plot that is older than its results.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from figures import TOP, read_result

IMAGES = TOP / "docs" / "images"
OURS = "#0072b2", "#56b4e9"  # told apart by readers who see few colours
_PEER, _FLOOR = "#d55e00", "#999999"
PEERS = {
    "FBGEMM": _PEER,
    "FBGEMM's": _PEER,
    "resident": _PEER,
    "torch": "#e69f00",
    "floor:": _FLOOR,
}  # by first words
WIDTH, HEIGHT = 9.0, 3.5  # inches
HASH = re.compile(r"sha256 of what is drawn: ([0-9a-f]{64})")


@dataclass(frozen=True)
class Bars:
    """Groups of bars. values: series -> a height for each group; labels: the same, what is written on the
    bars."""

    title: str
    unit: str
    groups: tuple[str, ...]
    values: dict[str, tuple[float, ...]]
    labels: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Lines:
    """Lines over the same steps. values: series -> a height for each step."""

    title: str
    unit: str
    steps: tuple[str, ...]
    values: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Panels:
    """Lines beside each other on one scale. panels: what is written over each -> its lines."""

    title: str
    unit: str
    panels: dict[str, Lines]


Plot = Bars | Lines | Panels


def rows_of(file: str, **where: Any) -> list[dict[str, Any]]:
    """The rows of a result file with these fields, which may be called what Python's names may not:
    f_1="x" is `f 1`."""
    names = {key.replace("_", " "): value for key, value in where.items()}
    return [row for row in read_result(file)["rows"] if all(row.get(k) == v for k, v in names.items())]


def one(rows: Sequence[dict[str, Any]], **where: Any) -> dict[str, Any]:
    """The one row that has these fields."""
    names = {key.replace("_", " "): value for key, value in where.items()}
    (found,) = [row for row in rows if all(row.get(k) == v for k, v in names.items())]
    return found


def bars(
    title: str, unit: str, groups: Sequence[str], values: dict[str, list[float]], form: str = "{:.0f}"
) -> Bars:
    """Bars with their heights written on them."""
    labels = {name: tuple(form.format(v) for v in found) for name, found in values.items()}
    return Bars(title, unit, tuple(groups), {name: tuple(found) for name, found in values.items()}, labels)


# ---- what is drawn ----


def http() -> Bars:
    """Requests/s over HTTP as multiples of the peer's; the bars name the requests/s themselves."""
    rows = read_result("http_lookup")["rows"]
    cases = list(dict.fromkeys(row["features x batch x ids"] for row in rows))
    ways = {"by name": "named", "compact form": "compact", "FBGEMM's operator, plain ASGI": "fbgemm"}
    rate = {
        name: [
            row["req/s"]
            for case in cases
            for row in rows
            if (row["features x batch x ids"], row["way"]) == (case, way)
        ]
        for name, way in ways.items()
    }
    peer = rate["FBGEMM's operator, plain ASGI"]
    values = {name: tuple(r / p for r, p in zip(found, peer, strict=True)) for name, found in rate.items()}
    labels = {name: tuple(f"{r:,.0f}" for r in found) for name, found in rate.items()}
    title = "Lookups over HTTP, one worker on one core: requests/s (on the bars)"
    groups = tuple(case.replace("x", "×") for case in cases)
    return Bars(title, "× FBGEMM's server; features × bags × ids a bag", groups, values, labels)


def cpu() -> Bars:
    """The CPU kernel beside FBGEMM's operator, pooled, one core."""
    rows = rows_of("cpu_lookup", ids="uniform", pooling="sum", batch=4096)
    groups = [f"{row['format']} D {row['dim']}" for row in rows]
    title = "Pooled lookups on one core, batch 4096 × 20 uniform ids over 1 GiB"
    values = {
        name: [row[f"{key} M rows/s"] for row in rows]
        for name, key in (("Tableside", "native"), ("FBGEMM", "fbgemm"))
    }
    return bars(title, "M rows/s", groups, values)


def cpu_sizes() -> Panels:
    """The CPU kernel over tables of several sizes, from two machines, beside FBGEMM's operator, torch's and
    the floor."""
    series = {
        "Tableside": "native",
        "FBGEMM": "fbgemm",
        "torch": "torch",
        "floor: a loop that touches rows": "loop",
    }
    panels = {}
    for name, machine in (("cpu_sizes_xeon", "Xeon"), ("cpu_sizes_epyc", "EPYC")):
        rows = rows_of(name, ids="uniform", tables=1)
        values = {label: tuple(row[f"{key} M rows/s"] for row in rows) for label, key in series.items()}
        panels[machine] = Lines("", "", tuple(str(row["GiB"]) for row in rows), values)
    title = "Pooled lookups on one core over the size of the table, int8 D 64, uniform ids"
    return Panels(title, "M rows/s; GiB of the table", panels)


def gpu_lookup() -> Bars:
    """The fused GPU kernel beside FBGEMM's and its floor."""
    rows = rows_of("gpu_lookup", D=128, batch=4096, pooling="sum")
    groups = [f"{r['format']}, {r['ids']}" for r in rows]
    series = (
        ("Tableside", "ours_us"),
        ("FBGEMM", "fbgemm_us"),
        ("floor: the bytes at copy speed", "floor_us"),
    )
    title = "26 tables × 500 k rows × D 128 in the HBM of one H200, batch 4096 × 20"
    return bars(title, "µs", groups, {name: [r[key] for r in rows] for name, key in series})


def gpu_cache() -> Bars:
    """The cache beside FBGEMM's, both called as they are used: keys/s of one table that is ten times the
    cache."""
    rows = rows_of("gpu_cache_keys", policy="lru")
    works = list(dict.fromkeys(row["work"] for row in rows))

    def series(way: str, threads: int, field: str = "M keys/s") -> list[float]:
        return [one(rows, work=work, way=way, CPU_threads=threads)[field] for work in works]

    served = max(row["CPU threads"] for row in rows if row["as served"])
    values = {
        "as served, as many slots": series("equal slots", served),
        "no threads gather, as many slots": series("equal slots", 0),
        "FBGEMM MANAGED_CACHING": series("equal slots", served, "fbgemm M keys/s"),
    }
    return bars("One table, 10 % cached, LRU, 262,144 keys a call, one H200", "M keys/s", works, values)


def disk_rows() -> Lines:
    """Rows a second of a table on a disk, over the memory that it is given."""
    return _over_memory("rows_s", 1e-6, "M rows/s")


def disk_misses() -> Lines:
    """How many of the rows the disk has to give, over the same."""
    return _over_memory("from_disk", 100, "% of the ids read from the disk")


def _over_memory(field: str, scale: float, unit: str) -> Lines:
    rows = read_result("disk_memory")["rows"]
    ways = {"as a hot segment": "hot", "as page cache": "pages"}
    values = {name: tuple(row[f"{field}_{way}"] * scale for row in rows) for name, way in ways.items()}
    steps = tuple(f"1/{1 / row['share']:.0f}" for row in rows)
    title = "Rows of 4 GB on a disk, int8 D 64, Zipf 1.05: memory given"
    return Lines(title, f"{unit}; memory over the bytes of the table", steps, values)


def gpu_stash() -> Lines:
    """Memory along a training step, with and without stashing."""
    ways = {"resident": "none", "stashed while the dense part runs": "at points"}
    rows = {name: one(read_result("gpu_stash")["rows"], way=way)["timeline"] for name, way in ways.items()}
    steps = tuple(step.removeprefix("layer ").removeprefix("backward ") for step, _ in rows["resident"])
    values = {name: tuple(gib for _, gib in found) for name, found in rows.items()}
    return Lines(
        "Memory along a training step, 12 GiB of embedding weights",
        "GiB allocated; layer, forward and backward",
        steps,
        values,
    )


def row_formats() -> Bars:
    """What each row format costs a small DLRM, from more bytes to fewer; a gain has no bar."""
    rows = sorted(read_result("row_formats")["rows"], key=lambda row: -row["bytes D 64"])[1:]
    lost = {
        "clicks that are made up": [1000 * row["NE against fp32"] for row in rows],
        "MovieLens 100K": [1000 * row["NE against fp32 of ratings"] for row in rows],
    }
    groups = tuple(row["format"].replace("_block", "\nblock") for row in rows)
    heights = {name: tuple(max(0.0, x) for x in of) for name, of in lost.items()}
    labels = {name: tuple(f"{x:+.2f}" for x in of) for name, of in lost.items()}
    title = "Row formats of a DLRM of D 32, scored on held-out rows"
    return Bars(title, "NE above fp32's, thousandths", groups, heights, labels)


PLOTS: dict[str, Callable[[], Plot]] = {
    "http": http,
    "cpu": cpu,
    "cpu_sizes": cpu_sizes,
    "row_formats": row_formats,
    "gpu_lookup": gpu_lookup,
    "gpu_cache": gpu_cache,
    "gpu_stash": gpu_stash,
    "disk_rows": disk_rows,
    "disk_misses": disk_misses,
}


def hash_of(plot: Plot) -> str:
    """Of everything that a plot shows."""
    return hashlib.sha256(json.dumps(asdict(plot), sort_keys=True).encode()).hexdigest()


# ---- drawing ----


def draw(plot: Plot, path: Path) -> None:
    """Writes a plot as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    settings: dict[Any, Any] = {
        "svg.hashsalt": "tableside",
        "svg.fonttype": "none",
        "font.size": 9,
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(settings):
        panels = plot.panels if isinstance(plot, Panels) else {"": plot}
        figure, drawn = plt.subplots(1, len(panels), figsize=(WIDTH, HEIGHT), sharey=True, squeeze=False)
        figure.subplots_adjust(left=0.08, right=0.99, bottom=0.14, top=0.82, wspace=0.05)
        for axes, (name, panel) in zip(drawn[0], panels.items(), strict=True):
            _draw_bars(axes, panel) if isinstance(panel, Bars) else _draw_lines(axes, panel)
            axes.set_xlabel(plot.unit.partition("; ")[2])
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(name, y=0.9, fontsize=9)
        drawn[0][0].set_ylim(bottom=0)  # shared by all
        drawn[0][0].set_ylabel(plot.unit.partition(";")[0])
        figure.suptitle(plot.title, x=0.08, y=0.99, ha="left", fontsize=10)
        drawn[0][0].legend(
            loc="lower left", bbox_to_anchor=(0, 1.02), ncols=4, frameon=False, borderaxespad=0
        )
        metadata = {
            "Date": None,
            "Title": plot.title,
            "Description": f"sha256 of what is drawn: {hash_of(plot)}",
        }
        figure.savefig(path, metadata=metadata)
        plt.close(figure)


def _colour(name: str, nth: int) -> str:
    return PEERS.get(name.split()[0]) or OURS[nth]


def _draw_bars(axes: Any, plot: Bars) -> None:
    width = 0.8 / len(plot.values)
    for n, (name, heights) in enumerate(plot.values.items()):
        at = [group - 0.4 + width * (n + 0.5) for group in range(len(plot.groups))]
        drawn = axes.bar(at, heights, width * 0.94, label=name, color=_colour(name, n))
        axes.bar_label(drawn, labels=plot.labels[name], padding=1, fontsize=7.5)
    axes.set_xticks(range(len(plot.groups)), plot.groups)


def _draw_lines(axes: Any, plot: Lines) -> None:
    for n, (name, heights) in enumerate(plot.values.items()):
        axes.plot(
            range(len(plot.steps)), heights, label=name, color=_colour(name, n), marker="o", markersize=3
        )
    axes.set_xticks(range(len(plot.steps)), plot.steps)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, make in PLOTS.items():
        path = IMAGES / f"{name}.svg"
        draw(make(), path)
        print(f"drawn: {path.relative_to(TOP)}")


if __name__ == "__main__":
    main()
