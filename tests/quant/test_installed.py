"""Pairs of fbgemm and torch."""

from importlib import metadata

import pytest

from quant.errors import MissingBackend, QuantError
from quant.installed import check_pair, pair_fits


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


def test_a_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(MissingBackend, match=r"install tableside\[cpu\]"):
        check_pair()
