"""deploy/: the rules for Prometheus and the dashboard for Grafana name metrics that a server has, and
promtool accepts them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import yaml
from servers import FEATURES, FORMATS, TABLES, Server, start_server
from support import end, until

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.serving.client import Client, ClientError
from tableside.serving.metrics import disk
from tableside.serving.metrics.counters import Counter, Histogram

pytestmark = pytest.mark.for_gpu

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
ELSEWHERE = {one.name for one in vars(disk).values() if isinstance(one, Counter | Histogram)} | {
    "tableside_follower_alive_timestamp_seconds"  # tests/serving/follow/test_status.py
}
PARTS = re.compile(r"_(?:bucket|count|sum)$")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "tableside.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """Every expression of both, with values in place of the dashboard's variables."""
    shown = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    shown += [rule["expr"] for rule in rules()]
    return [
        e.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*") for e in shown
    ]


def named(expression: str) -> set[str]:
    """The metrics that it names, those that the rules record left out."""
    return set(re.findall(r"(?<![:\w])tableside_\w+(?![\w:])", expression))


def publish(root: Path, folder: Path) -> None:
    """A version of the demo model with a scorer and a table that has a policy for ids without a row."""
    np.savez(folder / "demo.npz", **TABLES)
    raw = {
        "name": "demo",
        "checkpoint": "demo.npz",
        "tables": {
            t: {"key": t, "row_format": FORMATS[t], **({"missing": "zero"} if t == "user" else {})}
            for t in TABLES
        },
        "features": {**FEATURES, "again": {"table": "user", "pooling": "sum"}},
        "scorer": {"kind": "dot", "features": ["user", "again"]},
    }
    load(parse_model(raw, folder), root)


@pytest.fixture
def live(root: Path, tmp_path: Path) -> Iterator[Server]:
    """A server with a GPU's cache that scrubs all the time."""
    publish(root, tmp_path)
    device = (
        "--devices",
        tables.serve_device(),
        "--gpu-from-ids",
        0,
        "--placement",
        "cached",
        "--hbm-budget",
        "1MiB",
    )
    server = start_server(root, *device, "--scrub-hours", "0.00005")
    yield server
    assert end(server.process) == 0


@pytest.mark.thorough
def test_every_metric_exists_on_a_live_server(live: Server, root: Path, tmp_path: Path) -> None:
    """After lookups, scores, a refusal, a missing id, a swap, a change and a scrub, as a server has them
    within a day; but for those of tables on disks and other hosts."""
    with Client(live.url) as client:
        client.lookup("demo", {"clicked": [[1, 2], [3]], "user": [[100_000]]})
        client.score("demo", {"user": [[1]], "again": [[2]]})
        with pytest.raises(ClientError):
            client.lookup("nothing", {"user": [[1]]})
    publish(root, tmp_path)
    change = TableChanges("user", np.array([1]), np.ones((1, TABLES["user"].shape[1]), np.float32))
    apply(Model(root, "demo"), ChangeBatch([change]))
    asked = {name for name in set().union(*map(named, expressions())) if PARTS.sub("", name) not in ELSEWHERE}
    assert len(asked) > 40

    def lacking() -> set[str]:
        there = {
            re.split(r"[{ ]", line)[0]
            for line in live.get("/metrics").text.splitlines()
            if not line.startswith("#")
        }
        return asked - there

    until(lambda: not lacking(), 120, "the cache's counts, the swap and the scrub to be told")


def test_rules_stand_on_rules_that_there_are() -> None:
    """Every recorded name that an expression uses is recorded, and every alert says what to do."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert set(re.findall(r"\w+:\w+:\w+", " ".join(expressions()))) <= recorded
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert {"summary", "description", "runbook_url"} == set(rule["annotations"])


def test_the_runbook_has_a_heading_for_each_alert() -> None:
    """Which each alert's annotation links, and text below it."""
    sections = (DEPLOY.parent / "docs" / "runbook.md").read_text().split("\n## ")[1:]
    alerts = [rule for rule in rules() if "alert" in rule]
    headings = [section.partition("\n")[0] for section in sections]
    assert sorted(headings[:-1]) == sorted(a["alert"] for a in alerts) and headings[-1] == "Recovery"
    assert all(len(section.splitlines()) > 4 for section in sections)
    for alert in alerts:
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"


def test_panels_have_places_of_their_own() -> None:
    taken: dict[tuple[int, int], str] = {}
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24 and (panel["type"] == "row" or panel["targets"])
        for cell in (
            (x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
        ):
            assert cell not in taken, (panel["title"], taken.get(cell))
            taken[cell] = panel["title"]


def promtool(*arguments: object) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    promtool("check", "rules", RULES)
    promtool("test", "rules", RULES.with_name("rules_test.yaml"))


def test_every_alert_has_a_test() -> None:
    tested = RULES.with_name("rules_test.yaml").read_text()
    for rule in rules():
        if "alert" in rule:
            assert re.search(rf"alertname: {rule['alert']}\b(?!.*exp_alerts: \[\])", tested), rule["alert"]


@needs_promtool
def test_the_dashboards_expressions_are_promql(tmp_path: Path) -> None:
    made = [{"record": f"one:number_{k}:x", "expr": e} for k, e in enumerate(expressions())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": made}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")


@needs_promtool
def test_metrics_follow_prometheus_conventions(live: Server) -> None:
    """promtool's lint of /metrics has nothing to say."""
    text = live.get("/metrics").text
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
