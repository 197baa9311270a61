"""Keeps the numbers of README.md and docs/ equal to the result files that they come from.

    python benchmarks/figures.py            # says which numbers differ from their files, and which have no marker
    python benchmarks/figures.py --write    # writes the files' numbers into the texts, as many digits as are there

A text names a number's source behind it, in a comment that readers do not see: `146<!--f:cpu-int8--> M rows/s`. The keys stand in
docs/figures.toml (figure_values.py).

A marker stands for as many of the numbers before it as its keys have values: `0.5–2.8<!--f:ratios-->` has a key with two. Numbers
are looked for back to the marker before, the beginning of a paragraph or of a table's row.

Some numbers come from no result file. `<!--f:none REASON-->` exempts all numbers back to the marker before; REASONS has the
reasons. Every number with a unit of measurement (UNIT) needs a marker of one kind or the other. So does every number of a table
that has a marked one, but for the table's first column.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from figure_values import TOP, FigureError, as_printed, keys, values_of

NOT_CHECKED = ("docs/log.md",)  # a dated log of measurements

REASONS = {
    "goal": "what was asked for",
    "setting": "a limit or a default of the program, or the size of a workload",
    "peer": "another system's figure, as measured once",
    "log": "measured once; docs/log.md has the same number",
    "trial": "measured once while something was built; no benchmark repeats it",
    "run": "printed by a command that writes no result file; the text names the command",
    "arithmetic": "follows from other numbers of the text",
}

NUMBER = re.compile(r"(?<![\w.,^-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w^]|[.,]\d|-\d)")
MARKER = re.compile(r"<!--f:([^>]*?)-->")
# Behind a number, or behind more numbers of the same unit: 0.41 / 0.48 GB. `decimal`: numbers without decimals are settings.
UNIT = re.compile(
    r"(?:[*\s–/·]|<!--[^>]*-->|\d[\d,.]*\d|\d)*?(?:\s|-->)\s*"
    r"(?:(?:(?:[kMG]\s+)?(?:rows|keys|ids|requests|lookups)/s|[kMGT]B/s|ms|µs|ns|kB|MB|GB)\b|(?P<decimal>×|%|s\b))"
)
MEASURED_SECTIONS = ("What it costs", "What was found last")


# ---- texts ----


def documents() -> list[Path]:
    """README.md and the pages of docs/ that are checked."""
    return [p for p in (TOP / "README.md", *sorted((TOP / "docs").glob("*.md"))) if str(p.relative_to(TOP)) not in NOT_CHECKED]


def without_code(text: str) -> str:
    """The text with code, links' targets and other comments as spaces, so that places stay what they are."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r"^```.*?^```", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?:(?<=\n\n)|\A)(?: {4}.*\n|\n)+", blank, text)
    text = re.sub(r"`[^`\n]+`", blank, text)
    text = re.sub(r"\]\([^)]*\)", blank, text)
    return re.sub(r"<!--(?!f:).*?-->", blank, text, flags=re.DOTALL)


@dataclass(frozen=True)
class Marked:
    """A marker of a text, and the numbers that it stands for, as spans. values: None where the numbers come from no file."""

    keys: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    values: tuple[float, ...] | None


@dataclass(frozen=True)
class Text:
    """A document as it is checked. faults: what is wrong with its markers themselves."""

    name: str
    text: str
    marked: tuple[Marked, ...]
    faults: tuple[str, ...]


def read_text(name: str, text: str) -> Text:
    """Finds the markers of a text and their numbers."""
    plain = without_code(text)
    marked, faults, last = [], [], 0
    for marker in MARKER.finditer(plain):
        block = max(last, _block_start(plain, marker.start()))
        numbers = [m.span() for m in NUMBER.finditer(plain, block, marker.start())]
        last = marker.end()
        try:
            marked.append(_marked(marker[1], numbers))
        except FigureError as e:
            faults.append(f"{name}:{line_of(text, marker.start())}: {e}")
    return Text(name, text, tuple(marked), tuple(faults))


def _marked(content: str, numbers: list[tuple[int, int]]) -> Marked:
    words = content.split()
    if words[:1] == ["none"]:
        if words[1:2] == [] or words[1] not in REASONS:
            raise FigureError(f"the reason {' '.join(words[1:])!r} is none of {', '.join(REASONS)}")
        if not numbers:
            raise FigureError("no number stands before the marker")
        return Marked((words[1],), tuple(numbers), None)
    values = tuple(value for key in words for value in values_of(key))
    if not values or len(numbers) < len(values):
        raise FigureError(f"{content!r} has {len(values)} values, and {len(numbers)} numbers stand before it")
    return Marked(tuple(words), tuple(numbers[-len(values) :]), values)


def _block_start(text: str, at: int) -> int:
    """Where the paragraph, list item or table row begins that has the place `at`."""
    line = text.rfind("\n", 0, at) + 1
    while line > 0 and not re.match(r"\s*(?:\||[*-] |\d+\. |$)", text[line : text.find("\n", line)]):
        line = text.rfind("\n", 0, line - 1) + 1
    return line


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def differing(found: Text) -> Iterator[tuple[tuple[int, int], str, Marked]]:
    """The numbers that are not their file's: where, and what they should be."""
    for marked in found.marked:
        for (start, end), value in zip(marked.spans, marked.values or (), strict=marked.values is not None):
            printed = found.text[start:end]
            if (right := as_printed(value, printed)) != printed:
                yield (start, end), right, marked


def unmarked(found: Text) -> list[tuple[int, int]]:
    """The numbers that look measured and have no marker."""
    covered = {span for marked in found.marked for span in marked.spans}
    return [span for span in measured(found) if span not in covered]


def measured(found: Text) -> Iterator[tuple[int, int]]:
    """The numbers that look measured: by their unit, or by the table that they stand in."""
    plain = without_code(found.text)
    cells = [*_measured_cells(found, plain)]
    for start, end in (m.span() for m in NUMBER.finditer(plain)):
        unit = UNIT.match(plain, end)
        has_unit = unit is not None and (unit["decimal"] is None or "." in plain[start:end])
        if has_unit or any(a <= start < b for a, b in cells):
            yield start, end


def not_logged(found: Text) -> Iterator[tuple[int, int]]:
    """The numbers that docs/log.md is said to have and does not have."""
    log = (TOP / "docs" / "log.md").read_text()
    looks_measured = {*measured(found)}
    for marked in (m for m in found.marked if m.values is None and m.keys == ("log",)):
        for start, end in marked.spans:
            is_meant = (start, end) in looks_measured or (start, end) == marked.spans[-1]
            if is_meant and not re.search(rf"(?<![\d.,]){re.escape(found.text[start:end])}(?!\d|[.,]\d)", log):
                yield start, end


def _measured_cells(found: Text, plain: str) -> Iterator[tuple[int, int]]:
    """The rows of tables that are measured, without their first cells."""
    section, at = "", 0
    tables: list[list[tuple[int, int]]] = [[]]
    starts = [marked.spans[0][0] for marked in found.marked if marked.values is not None]
    for line in plain.splitlines(keepends=True):
        if line.startswith("#"):
            section = line.lstrip("# ").strip()
        if line.startswith("|"):
            tables[-1].append((at + line.index("|", 1), at + len(line)))
        elif tables[-1]:
            yield from _rows_if_measured(tables[-1], section, starts)
            tables.append([])
        at += len(line)
    yield from _rows_if_measured(tables[-1], section, starts)


def _rows_if_measured(rows: list[tuple[int, int]], section: str, starts: Sequence[int]) -> list[tuple[int, int]]:
    """A table's rows behind its heading, if its section is one of measurements or one of its numbers is marked."""
    is_measured = section in MEASURED_SECTIONS or any(a <= s < b for s in starts for a, b in rows)
    return rows[2:] if is_measured else []


def faults_of(found: Text) -> list[str]:
    """Everything that is wrong with a text's figures, a line each."""
    faults = list(found.faults)
    for (start, end), right, marked in differing(found):
        where = f"{found.name}:{line_of(found.text, start)}"
        faults.append(f"{where}: {found.text[start:end]} of {' '.join(marked.keys)} is {right} in its file")
    lines: dict[int, list[str]] = {}
    for start, end in unmarked(found):
        lines.setdefault(line_of(found.text, start), []).append(found.text[start:end])
    faults += [f"{found.name}:{line}: no marker behind {' and '.join(numbers)}" for line, numbers in lines.items()]
    for start, end in not_logged(found):
        faults.append(f"{found.name}:{line_of(found.text, start)}: docs/log.md has no {found.text[start:end]}")
    return faults


def used_keys(texts: Sequence[Text]) -> set[str]:
    """The keys that some text names."""
    return {key for text in texts for marker in MARKER.finditer(text.text) for key in marker[1].split()}


def corrected(found: Text) -> str:
    """The text with its files' numbers."""
    text = found.text
    for (start, end), right, _ in sorted(differing(found), reverse=True, key=lambda d: d[0]):
        text = text[:start] + right + text[end:]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files' numbers into the texts")
    options = parser.parse_args()
    texts = []
    for path in documents():
        found = read_text(str(path.relative_to(TOP)), path.read_text())
        if options.write and (text := corrected(found)) != found.text:
            path.write_text(text)
            print(f"{found.name}: {sum(1 for _ in differing(found))} numbers written")
            found = read_text(found.name, text)
        texts.append(found)
    faults = [fault for text in texts for fault in faults_of(text)]
    faults += [f"docs/figures.toml: no text names {key}" for key in sorted(set(keys()) - used_keys(texts))]
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
