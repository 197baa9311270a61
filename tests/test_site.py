"""The site of docs/ is built offline and strictly, and what its pages show works."""

import contextlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from browsers import needs_chromium, page_of
from servers import Server, running
from support import run_tableside

import tableside.torch
from tableside.serving.client import Client

TOP = Path(__file__).parent.parent


def build(top: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    """`make docs`, of a tree, into a folder. No name is resolved: a build that asked the network would
    fail."""
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(top / "mkdocs.yml")]
    without_network = ["unshare", "--net", "--map-root-user"]
    alone = subprocess.run([*without_network, "true"], capture_output=True, check=False).returncode == 0
    full = [*(without_network if alone else []), *command, "--site-dir", str(site)]
    return subprocess.run(full, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(TOP, folder)
    assert done.returncode == 0, done.stderr
    return folder


class _Loaded(HTMLParser):
    """What a browser fetches by itself for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.urls += [url for url in (found.get("src"), found.get("srcset")) if url]
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.urls.append(found.get("href") or "")


@pytest.mark.thorough
def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and images are files of the site; every one of them is there."""
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text())
        assert loaded.urls
        for url in loaded.urls:
            assert not re.match(r"(?:https?:)?//", url), f"{page.name} fetches {url}"
            path = url.partition("?")[0].partition("#")[0]
            assert url.startswith("data:") or (site / path.lstrip("/")).exists(), (
                url
            )  # of 404.html they begin at the top
    styles = "".join(p.read_text() for p in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", styles)


@pytest.mark.thorough
def test_the_search_has_what_file_pages_need(site: Path) -> None:
    """The index as a script, and before the theme's own script that which stands for a worker."""
    assert (site / "search/search_index.js").read_text().startswith("var __index = {")
    for page in site.glob("*.html"):
        scripts = re.findall(r'<script src="([^"]+)"', page.read_text())
        assert [Path(s).name.split(".")[0] for s in scripts] == ["iframe-worker", "bundle"], page.name


@needs_chromium
@pytest.mark.thorough
def test_the_search_works_from_a_file(site: Path) -> None:
    """Without a server: a word finds its page and its heading."""
    shown = page_of(f"{(site / 'index.html').as_uri()}?q=compaction")
    found = [tag for tag in re.findall(r"<a [^>]+>", shown) if "md-search-result__link" in tag]
    assert any("updates.html" in tag and "#compaction" in tag for tag in found), found


def test_the_api_reference_has_every_name_that_is_exported() -> None:
    """And no other."""
    named = re.findall(r"^::: tableside\.([\w.]+)$", (TOP / "docs/api.md").read_text(), re.MULTILINE)
    exported = [*tableside.__all__, *(f"torch.{name}" for name in tableside.torch.__all__)]
    assert sorted(named) == sorted(exported)


def test_every_page_is_in_the_navigation_and_limits_come_first() -> None:
    """A page that is not would be found by search alone."""
    nav = yaml.safe_load((TOP / "mkdocs.yml").read_text())["nav"]
    files = re.findall(r"[\w-]+\.md", str(nav))
    assert sorted(files) == sorted(p.name for p in (TOP / "docs").glob("*.md"))
    assert files[:2] == ["index.md", "limits.md"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[x](nowhere.md)", "nowhere.md"),
        ("[x](limits.md#nowhere)", "nowhere"),
        ("[x](../quant/nowhere.py)", "nowhere.py is not there"),
    ],
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, text: str, complaint: str) -> None:
    """To a page, to a heading, to a file of the repository."""
    for name in ("docs", "builder"):
        shutil.copytree(TOP / name, tmp_path / name)
    shutil.copy(TOP / "mkdocs.yml", tmp_path)
    for page in (tmp_path / "docs").glob("*.md"):
        if page.name not in ("index.md", "limits.md"):
            page.write_text("# A page\n")
    (tmp_path / "docs/index.md").write_text(f"# Index\n\n{text}\n")
    (tmp_path / "docs/limits.md").write_text("# Limits\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and complaint in done.stdout + done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path) as one:
        yield one


@pytest.mark.thorough
def test_an_unchanged_triton_client_asks_as_the_page_says(server: Server) -> None:
    """The block of docs/from-triton.md, on another port."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (TOP / "docs/from-triton.md").read_text(), re.MULTILINE | re.DOTALL
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(
            compile(
                code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"), "docs/from-triton.md", "exec"
            ),
            {},
        )
    assert printed.getvalue() == "(2, 64)\n"


@pytest.mark.drawn(0.25)
def test_settings_and_metrics_that_the_page_names_exist(server: Server) -> None:
    """Options of commands, and names of metrics that a server shows."""
    text = (TOP / "docs/from-triton.md").read_text()
    shown = run_tableside("serve", "--help").stdout
    options = set(re.findall(r"`(--[a-z-]+)", text)) - {"--model-control-mode"}
    assert len(options) > 5 and all(option in shown for option in options)
    with Client(server.url) as client:  # a server that answered nothing has not counted anything
        client.lookup("demo", {"user": [[1, 2]]})
    metrics = server.get("/metrics").text
    names = set(re.findall(r"`(tableside_\w+)`", text))
    assert names and all(name.removesuffix("_total") in metrics for name in names)
