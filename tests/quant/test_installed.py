"""Pairs of fbgemm and torch."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tableside.quant.errors import MissingBackend, QuantError
from tableside.quant.installed import check_pair, pair_fits


@pytest.mark.parametrize(
    ("fbgemm", "torch", "fits"),
    [
        ("1.8.0", "2.13.0+cpu", True),
        ("1.6.0", "2.11.0+cu130", True),
        ("1.9.0", "2.13.0", False),
        ("0.1.0", "2.13.0", False),
    ],
)
def test_pairs(fbgemm: str, torch: str, fits: bool) -> None:
    assert pair_fits(fbgemm, torch) is fits


def test_a_mismatched_pair_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.6.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    with pytest.raises(QuantError, match=r"fbgemm 1\.6\.0 and torch 2\.13\.0\+cpu do not belong together"):
        check_pair()


def test_a_mismatched_pair_is_refused_at_the_start_of_a_command(tmp_path: Path) -> None:
    """By `tableside load` too, on whichever backend; here the versions come from a folder of false
    metadata."""
    for name, version in (("torch", "2.13.0"), ("fbgemm_gpu_cpu", "1.6.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    script = "from tableside.quant import choose; choose('native')"
    command = [sys.executable, "-c", script]
    found = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False
    )
    assert "fbgemm 1.6.0 and torch 2.13.0 do not belong together" in found.stderr


def test_a_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(MissingBackend, match=r"install tableside\[fbgemm\]"):
        check_pair()
