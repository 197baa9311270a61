"""What commands and metrics say of ids that compactions dropped."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aging import IDS, change, publish
from support import run_tableside

from tableside.loader.deltas.compact import compact

Start = Callable[..., Any]


@pytest.mark.drawn(0.25)
def test_ids_that_went_are_counted(root: Path, tmp_path: Path, start: Start) -> None:
    """By the command that drops them, in lists since the load, and in metrics. The load was years ago."""
    model = publish(tmp_path, root, ttl="30d", max_rows=40)
    change(model, 10**4, IDS[:50])
    done = run_tableside("compact", "demo", "--root", root)
    assert re.search(r"2 is live: 40 rows, 50 changes merged, 350 expired, 10 beyond max_rows, ", done.stdout)
    assert "has no changes over it" in run_tableside("compact", "demo", "--root", root).stdout
    change(model, 10**4, [1, 2, 3])
    found = json.loads(run_tableside("compact", "demo", "--root", root, "--json").stdout)
    assert (found["compacted"], found["expired"], found["evicted"], found["rows"]) == (True, 0, 3, 40)
    text = run_tableside("list", "--root", root).stdout
    assert "demo 3: 350 ids expired, 13 evicted, since its load" in text and "demo 1:" not in text
    listed = json.loads(run_tableside("list", "--root", root, "--json").stdout)["versions"]
    assert [(v["version"], v["expired"], v["evicted"]) for v in listed] == [(2, 350, 10), (3, 350, 13)]
    text = run_tableside("inspect", "demo", "--root", root).stdout
    assert re.search(r"ttl 2,592,000 s,\s+350\s+expired,\s+at\s+most\s+40,\s+13\s+evicted", text)
    (table,) = json.loads(run_tableside("inspect", "demo", "--root", root, "--json").stdout)["tables"]
    assert [table[key] for key in ("ttl_s", "max_rows", "expired", "evicted")] == [2592000, 40, 350, 13]
    metrics = start().get("/metrics").text
    for reason, count in (("expired", 350.0), ("evicted", 13.0)):
        said = f'tableside_dropped_ids{{model="demo",reason="{reason}",table="t"}} {count}'
        assert said in metrics
    assert compact(model) is None
