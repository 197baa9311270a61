"""A real tmpfs of a bounded size that only one command and its children see: what a full /dev/shm does,
and to nobody else."""

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@functools.cache
def _unshare() -> tuple[str, ...]:
    """Needs root, or user namespaces that may mount; the reason is said where this machine has neither."""
    for way in (("-m",), ("-r", "-m")):
        tried = subprocess.run(
            ["unshare", *way, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
        )
        if tried.returncode == 0:
            return way
    return ()


def on_small_tmpfs(folder: Path, options: str) -> list[str]:
    """The words before a command, whose `folder` is a tmpfs of these mount options."""
    if not (way := _unshare()):
        pytest.skip(
            "a bounded tmpfs needs root or a user namespace that may mount; this machine allows neither"
        )
    folder.mkdir(exist_ok=True)
    return ["unshare", *way, "sh", "-c", f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"', str(folder)]


@contextmanager
def mounted_tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs that everybody sees."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr!r}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def seen_by(pid: int, path: Path) -> Path:
    """The path as the process sees it."""
    return Path(f"/proc/{pid}/root{path}")


def fill(folder: Path) -> None:
    """Takes every byte that is left."""
    with (folder / "filler").open("wb") as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            except OSError:
                continue
