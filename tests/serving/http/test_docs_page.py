"""/docs and /openapi.json: whole, true, and without any other host."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from browsers import needs_chromium, page_of
from raw_loads import publish_raw
from servers import Server, start_server
from string_tables import publish_strings
from support import end, rows_of

from tableside.serving.client import Client


@pytest.fixture(scope="module")
def described(server: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/openapi.json").json()
    return found


def test_every_reference_resolves(described: dict[str, Any]) -> None:
    """Also when it is asked for again, and by the other worker."""
    refs = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(described)))
    assert refs and refs <= set(described["components"]["schemas"])


def test_it_is_the_same_each_time(server: Any, described: dict[str, Any]) -> None:
    assert all(server.get("/openapi.json").json() == described for _ in range(5))


def test_every_operation_tells_what_it_refuses(described: dict[str, Any]) -> None:
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            assert {"200", "405"} <= set(operation["responses"]), (method, path)
            if method == "post":
                assert {"400", "413", "503"} <= set(operation["responses"]), path


@pytest.mark.drawn(0.5)
def test_both_protocols_are_described(server: Any, described: dict[str, Any]) -> None:
    """Every path that is described is there: what is asked of it without anything is no 404 of an unknown
    path."""
    assert {"/v1/lookup", "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"} <= set(
        described["paths"]
    )
    values = {"{model}": "demo", "{version}": "1", "{region}": "r"}
    for path, operations in described["paths"].items():
        for method in operations:
            asked = re.sub(r"{\w+}", lambda m: values[m[0]], path)
            found = httpx.request(method, server.url + asked)
            assert found.status_code != 405 and "is not a path of this server" not in found.text, (
                method,
                path,
                found.text,
            )


def _examples(described: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The paths and bodies of all examples, their parameters filled in."""
    found = []
    for path, operations in described["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "example" in content.get("application/json", {}):
            given = {
                p["name"]: p["example"] for p in operations["post"].get("parameters", ()) if "example" in p
            }
            found.append((path.format(**given), content["application/json"]["example"]))
    return found


def _answered(server: Server, expected: set[str]) -> dict[str, dict[str, Any]]:
    """The examples by path; the server answers each of them, and there are those that are expected."""
    examples = dict(_examples(server.get("/openapi.json").json()))
    assert set(examples) == expected
    for path, body in examples.items():
        found = httpx.post(server.url + path, json=body)
        assert found.status_code == 200, (path, body, found.text)
    return examples


def test_examples_are_of_what_is_served(server: Server) -> None:
    """Each is answered as it stands; its features are those of the model, and its model and version are
    filled into the paths."""
    paths = {"/v1/lookup", "/v2/models/demo/infer", "/v2/models/demo/versions/1/infer"}
    examples = _answered(server, paths)
    assert examples["/v1/lookup"] == server.get("/v1/models").json()["models"][0]["example"]
    assert list(examples["/v1/lookup"]["features"]) == ["clicked", "user", "liked"]
    described = server.get("/openapi.json").json()
    assert [p["example"] for p in described["paths"]["/v2/models/{model}/stats"]["get"]["parameters"]] == [
        "demo"
    ]


@pytest.mark.drawn(0.25)
def test_examples_of_odd_models(root: Path, tmp_path: Path, start: Callable[..., Server]) -> None:
    """Raw ids, strings, which are known only where any is answered, and a scorer with dense inputs."""
    ids = np.array([-5, 1 << 40, 7])
    values = rows_of(3, 8)
    tables = {"raw": (ids, values), "loose": (["x", "y", "z"], values), "strict": (["x", "y", "z"], values)}
    of = {"loose": {"missing": "zero"}, "raw": {"missing": "error"}}
    features = {name: {"table": name} for name in ("strict", "loose", "raw")}
    scorer = {"kind": "dot", "features": ["loose", "raw"]}
    publish_strings(tmp_path, root, tables, of=of, features=features, scorer=scorer)
    paths = {"/v1/lookup", "/v1/score", "/v2/models/demo/infer", "/v2/models/demo/versions/1/infer"}
    examples = _answered(start(), paths)
    asked = examples["/v1/lookup"]["features"]
    assert list(asked) == ["loose", "raw"], "no string of the strict table is known"
    assert set(asked["raw"][0]) <= set(ids.tolist()) and asked["loose"] == [["a", "b"]]
    assert list(examples["/v1/score"]["features"]) == ["loose", "raw"]


@pytest.mark.drawn(0.25)
def test_no_disk_is_read_for_examples(disk: Path, tmp_path: Path) -> None:
    """Raw ids lie in their rows there: any id will do where the table answers any, and no other is shown."""
    ids, values = np.arange(100_000) * 7 + 3, rows_of(100_000, 16)
    features = {name: {"table": name} for name in ("strict", "loose")}
    tables = {"strict": (ids, values), "loose": (ids, values)}
    publish_raw(tmp_path, disk, tables, of={"loose": {"missing": "zero"}}, features=features, name="m")
    server = start_server(disk, models=("m",))
    try:
        paths = {"/v1/lookup", "/v2/models/m/infer", "/v2/models/m/versions/1/infer"}
        assert _answered(server, paths)["/v1/lookup"] == {"model": "m", "features": {"loose": [[0]]}}
    finally:
        assert end(server.process) == 0


@pytest.mark.drawn(0.25)
def test_no_model_no_example(root: Path, start: Callable[..., Server]) -> None:
    """Where nothing is served, nothing is made up."""
    (root / "demo").mkdir(parents=True)
    assert _examples(start("--all", models=()).get("/openapi.json").json()) == []


@pytest.mark.drawn(0.5)
def test_the_page_names_no_other_host(server: Any) -> None:
    text = server.get("/docs").text
    files = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert len(files) == 3 and all(file.startswith("/") for file in files) and "://" not in text
    for file in files:
        assert server.get(file).status_code == 200 and len(server.get(file).content) > 1000


@pytest.mark.thorough
@needs_chromium
def test_the_page_renders_without_a_network(server: Any) -> None:
    """In a browser that reaches this server alone: the operations of both protocols are shown, and no
    error."""
    shown = page_of(f"{server.url}/docs")
    for text in ("/v1/lookup", "Open Inference Protocol V2", "Model repository", "Tableside"):
        assert text in shown
    assert "Failed to load API definition" not in shown and "Resolver error" not in shown


@pytest.mark.thorough
def test_schemathesis_finds_nothing(start: Any, tmp_path: Path) -> None:
    """Generated requests, right and wrong: statuses, bodies and headers are those that the description has,
    and no 500 comes.

    One of its checks is left out: that whatever the schema allows is answered. A schema does not know a
    model's features.
    """
    server: Server = start("--allow-client-shm", "--admin-token", "a-token-of-an-operator")
    report = tmp_path / "report.json"
    # A header that the description does not name is nothing wrong.
    (tmp_path / "schemathesis.toml").write_text("[generation]\nallow-extra-parameters = false\n")
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{server.url}/openapi.json",
        "--no-color",
        "--seed",
        "1",
    ]
    command += [
        "--phases",
        "examples,coverage,fuzzing",
        "--exclude-checks",
        "positive_data_acceptance",
        "--continue-on-failure",
    ]
    command += ["--max-examples", "5", "--generation-database", "none", "--no-shrink"]
    command += ["--report", "json", "--report-json-path", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["failures"] == [] and found["errors"] == [], done.stdout[-8000:]
    assert found["test_cases"]["generated"] > 200 and not found["warnings"]["unresolvable_reference"]
    with Client(server.url) as client:
        assert 'kind="internal"' not in client.metrics()
