"""docs/claims.md, rendered from the entries."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from campaigns.claims.entries import TOP, Claim, Cut

PAGE = TOP / "docs" / "claims.md"

HEAD = """# Claims and their tests

Each claim below stands in README or in a document, or follows from it, and names the tests that hold it. The lines under it
make it true. They were taken out of a copy of the tree, one claim at a time, and every test named then failed by itself.
`make claims` does that again for all {count} claims, and `make claims CLAIMS="--only http"` for one area. What is written in C
is compiled anew. Neither this tree nor this machine's `/dev/shm` is touched.

This page is written by `python -m campaigns.claims --write` from the files in `campaigns/claims/`. Their format is described in
`campaigns/claims/__init__.py`.
"""


def render(claims: list[Claim]) -> str:
    """The page's text: a section for each area, in it a paragraph for each claim and the lines that are taken out."""
    parts = [HEAD.format(count=len(claims))]
    for area, found in groupby(claims, key=lambda claim: claim.area):
        parts.append(f"## {area.capitalize() if len(area) > 4 else area.upper()}\n")
        parts.extend(_paragraph(claim) for claim in found)
    return "\n".join(parts)


def _paragraph(claim: Claim) -> str:
    tests = ", ".join(f"[{name}](../{path})" for path, _, name in (test.partition("::") for test in claim.tests))
    needs = " Its tests need a GPU." if claim.gpu else ""
    lines = "\n".join(line for cut in claim.cuts for line in _diff(cut))
    return f"**{claim.claim}** ({Path(claim.said_in).name}) Tests: {tests}.{needs}\n\n```diff\n{lines}\n```\n"


def _diff(cut: Cut) -> Iterator[str]:
    yield f"@@ {cut.file}"
    yield from (f"- {line}" for line in cut.delete.strip("\n").split("\n"))
    if cut.instead.strip():
        yield from (f"+ {line}" for line in cut.instead.strip("\n").split("\n"))
