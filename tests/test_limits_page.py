"""docs/limits.md says what is so: each sentence is held by a test, or was looked at on a day."""

import ast
import re
from datetime import date
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
LIMITS = [
    " ".join(item.split())
    for section in (TOP / "docs/limits.md").read_text().split("\n## ")[1:]
    for item in section.partition("\n")[2].split("\n* ")
    if item.strip()
]
HELD = re.compile(r"<!--(?:test: (?P<file>[\w/]+\.py)::(?P<test>\w+)|seen: (?P<day>[\d-]+))-->$")


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit[2:40])
def test_each_limit_is_held_by_a_test_or_a_day(limit: str) -> None:
    held = HELD.search(limit)
    assert held is not None, "expected <!--test: FILE::TEST--> or <!--seen: DATE--> behind it"
    if held["day"]:
        assert date(2026, 1, 1) <= date.fromisoformat(held["day"])
        return
    tests = {
        node.name
        for node in ast.parse((TOP / held["file"]).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert held["test"] in tests


def test_there_are_limits() -> None:
    assert len(LIMITS) > 10
