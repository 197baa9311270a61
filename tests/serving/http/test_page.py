"""The page for people at `/`: what it shows is what the server says, live, in light and dark, and it can
change nothing."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import needs_chromium, page_of, screenshot
from raw_loads import publish_raw
from support import rows_of, run_tableside

from tableside.serving.client import Client

PAGE = Path(__file__).parents[3] / "serving" / "http" / "page"
FIXTURES = Path(__file__).parents[2] / "fixtures"
needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed (Debian: apt-get install nodejs)"
)
FILES = {file.name: "/" if file.name == "index.html" else f"/page/{file.name}" for file in PAGE.iterdir()}


def test_its_files_are_served(server: Any) -> None:
    """Each with its type, and with a policy that lets the browser load nothing from another host."""
    assert len(FILES) == 7
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for name, path in FILES.items():
        found = server.get(path)
        assert found.status_code == 200 and found.content == (PAGE / name).read_bytes()
        assert found.headers["content-type"].startswith(types[Path(name).suffix])
        assert found.headers["content-security-policy"].startswith("default-src 'self';")


def test_it_names_no_other_host_and_changes_nothing() -> None:
    """It asks by GET, and posts lookups that somebody sends."""
    for name in FILES:
        text = (PAGE / name).read_text()
        assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert "innerHTML" not in text and "eval(" not in text
    scripts = "".join((PAGE / name).read_text() for name in FILES if name.endswith(".js"))
    paths = re.findall(r'(?:fetch|asked)\("([^"]+)"', scripts)
    assert sorted(paths) == ["/metrics", "/v1/lookup", "/v1/models"]
    assert scripts.count("fetch(") == 2 and scripts.count("method:") == 1
    markup = (PAGE / "index.html").read_text()
    assert not re.search(r"<(form|input|iframe|object)\b|\bon\w+=|\bstyle=", markup)


def test_models_say_what_the_page_shows(server: Any) -> None:
    told = server.get("/v1/models").json()
    assert (
        told["server"]["devices"] == []
        and told["server"]["doors"][0].startswith("HTTP")
        and told["server"]["version"]
    )
    tables = {t["name"]: t for t in told["models"][0]["tables"]}
    assert (tables["user"]["bytes"], tables["user"]["placement"]) == (1000 * 68, "host")


@needs_node
def test_its_figures_are_right(server: Any, tmp_path: Path) -> None:
    """Rates, quantiles and units of the script, from texts that a server wrote."""
    with Client(server.url) as client:
        client.lookup("demo", {"user": [[1]]})
        before = client.metrics()
        for _ in range(20):
            client.lookup("demo", {"user": [[1, 2], [3, 4]]})
        now = client.metrics()
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copy(PAGE / "figures.js", tmp_path)
    shutil.copy(FIXTURES / "page_figures.js", tmp_path)
    (tmp_path / "before.txt").write_text(before)
    (tmp_path / "now.txt").write_text(now)
    done = subprocess.run(
        ["node", "page_figures.js"], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shown, model = found["overview"], found["model"]
    assert (shown["requests"], shown["ids"], shown["notAnswered"], shown["hasCache"]) == (10, 40, 0, False)
    assert 0 < shown["p50"] <= shown["p99"] < 10 and shown["hits"] is None
    assert (model["requests"], model["ids"], model["refused"], model["lag"]) == (10, 40, 0, "")
    assert model["p99"] == shown["p99"]
    assert found["odd"] == ['q"\\\n}', 2.5, False]
    assert (
        found["quantiles"] == pytest.approx([0.1, 0.2, 0.3])
        and found["nothing"] is None
        and found["restarted"] == 0
    )
    assert dict(found["tiers"]) == pytest.approx(
        {"hot": 0.75, "memory": 8 / 14, "disk": 4 / 14, "not read": 2 / 14, "elsewhere": 1, "did not come": 0}
    )
    assert model["tables"][0]["tiers"] == []
    assert found["lag"] == "version 4 is live and not taken"
    assert found["units"] == (
        "999|1.23 M|0.50|–|1.00 M|1.50 KiB|3.00 GiB|98.7 %|310 µs|42.1 ms|2 s".split("|")  # noqa: SIM905
    )
    assert found["segments"] == [[[75, 42]], [[225, 6], [300, 6]]]
    assert [top for _, _, top in found["ticks"][1:]] == [0.005, 1, 2, 2000, 5000] and found["ticks"][0] == [
        0,
        1,
    ]


def _shown(url: str, folder: Path, looks: int = 2) -> dict[str, Any]:
    """What the page shows in node, after some looks, and what it answers a lookup that is tried."""
    (folder / "package.json").write_text('{"type": "module"}')
    for file in [*PAGE.glob("*.js"), FIXTURES / "page_dom.js"]:
        shutil.copy(file, folder)
    command = ["node", "page_dom.js", url, str(looks)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _sent(curl: str, python: str) -> tuple[dict[str, Any], str]:
    """What the shell's line answers, and what Python's lines print."""
    said = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=300, check=True).stdout
    command = [sys.executable, "-c", python]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    return json.loads(said), printed


@pytest.mark.drawn(0.25)
@needs_node
def test_what_the_page_shows(server: Any, tmp_path: Path) -> None:
    """Models with their tables and features, axes, and a lookup: it is answered, and so are its lines."""
    found = _shown(server.url, tmp_path, looks=3)
    for text in ("demo version 1 of 1", "4 features", "clicked item mean fp32", "text word none fp32"):
        assert text in found["text"], text
    for text in ("4 min ago 2 min now", "2 ready of 2", "Errors", "The CPU alone"):
        assert text in found["text"], text
    assert found["details"] == 1 and found["charts"] and max(c.count("L") for c in found["charts"]) >= 1
    example = server.get("/v1/models").json()["models"][0]["example"]
    status, answer = found["answered"].split(" ", 1)
    assert status == "200" and answer.startswith('{"model":"demo"')
    said, printed = _sent(found["curl"], found["python"])
    assert list(said["vectors"]) == list(example["features"]) and "'clicked': array(" in printed
    assert found["edited"].endswith(", found=True))")
    assert shlex.split(found["quoted"])[-1] == "it's", "what a shell would read is quoted"


@pytest.mark.drawn(0.25)
@needs_node
def test_a_lookup_of_ids_that_doubles_lack(root: Path, tmp_path: Path, start: Any) -> None:
    """Raw ids have 64 bits: the page asks for them as they are. Changes of rows are shown."""
    ids = np.array([(1 << 62) + 1, -(1 << 63) + 3, 5])
    features = {"its": {"table": "t", "pooling": "none"}}
    publish_raw(tmp_path, root, {"t": (ids, rows_of(3, 8))}, features=features)
    (tmp_path / "c.jsonl").write_text('{"table": "t", "id": 9, "vector": [1, 2, 3, 4, 5, 6, 7, 8]}\n')
    applied = run_tableside("apply", "demo", tmp_path / "c.jsonl", root=root)
    assert applied.returncode == 0, applied.stderr
    server = start()
    found = _shown(server.url, tmp_path, looks=1)
    asked = set(map(int, re.findall(r"-?\d{16,}", found["curl"])))
    assert asked and asked < set(ids.tolist()) and found["answered"].startswith("200 ")
    said, printed = _sent(found["curl"], found["python"])
    assert np.shape(said["vectors"]["its"]) == (2, 8) and "'its'" in printed
    assert re.search(r"changes up to rows bytes .* 1 1 ", found["text"])


@pytest.mark.thorough
@needs_chromium
def test_a_browser_shows_what_the_server_says(server: Any) -> None:
    """Models, tables with format, rows, dim, bytes and place, errors, workers; and charts that grow
    without a reload."""
    with Client(server.url) as client:
        client.lookup("demo", {"user": [[1, 2]]})
    shown = page_of(server.url + "/", wait_ms=12_000)
    text = re.sub(r"<[^>]+>", " ", shown[shown.index("<main>") :])
    assert re.search(r"demo\s+version 1 of 1", text) and 'class="pill good">ready' in shown
    assert re.search(r"user\s+int8\s+1\.00 k\s+64\s+66\.4 KiB\s+host\s+row numbers", text)
    assert re.search(r"item\s+int4\s+300\s+32\s+5\.86 KiB\s+host", text)
    for words in ("native", "no scorer", "2 ready of 2", "v2 ", "HTTP: /v1", "Errors", "The CPU alone"):
        assert words in text, words
    charts = re.findall(r'class="line" d="M([^"]+)"', shown)
    assert charts and max(chart.count("L") for chart in charts) >= 3


@pytest.mark.thorough
@needs_chromium
def test_light_and_dark(server: Any, tmp_path: Path) -> None:
    """The page follows what the user prefers."""
    image = pytest.importorskip(
        "matplotlib.image", reason="the dev extra brings matplotlib, which reads the screenshots"
    )
    corners = {}
    for name, options in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        screenshot(server.url + "/", tmp_path / f"{name}.png", (1280, 1000), *options)
        pixels = image.imread(tmp_path / f"{name}.png")[..., :3]
        corners[name] = float(pixels[-1, 0].mean())
        assert float(pixels.std()) > 0.02  # something is drawn
    assert corners["light"] > 0.9 and corners["dark"] < 0.15


@pytest.mark.thorough
@needs_chromium
def test_a_server_that_is_gone_is_told(tmp_path: Path) -> None:
    """Where nothing answers, the page says so: here its files are served by one that has no models and
    metrics."""
    import http.server
    import threading

    (tmp_path / "page").mkdir()
    for name in FILES:
        shutil.copy(PAGE / name, tmp_path / ("index.html" if name == "index.html" else f"page/{name}"))

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        try:
            shown = page_of(f"http://127.0.0.1:{files.server_port}/", wait_ms=4000)
        finally:
            files.shutdown()
            thread.join()
    assert "no answer: /v1/models answered 404" in shown or "no answer: /metrics answered 404" in shown
