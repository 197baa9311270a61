"""A headless Chromium that reaches this machine alone."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)


def _run(url: str, *options: str, wait_ms: int) -> str:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        command = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        command += [
            f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
            "--no-first-run",
        ]
        command += [f"--virtual-time-budget={wait_ms}", *options, url]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "HOME": profile},
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def page_of(url: str, wait_ms: int = 8000) -> str:
    """A page's elements as HTML, `wait_ms` of the page's time after it was opened."""
    return _run(url, "--dump-dom", wait_ms=wait_ms)


def screenshot(url: str, file: Path, size: tuple[int, int], *options: str, wait_ms: int = 8000) -> None:
    """Writes how a page looks, as PNG."""
    _run(url, f"--screenshot={file}", f"--window-size={size[0]},{size[1]}", *options, wait_ms=wait_ms)
