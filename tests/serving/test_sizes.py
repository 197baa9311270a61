"""Sizes, as users write them."""

import pytest

from tableside.serving.settings import ServerSettings
from tableside.serving.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1_000_000", 10**6),
        ("64MiB", 64 << 20),
        ("64M", 64 << 20),
        ("64mi", 64 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("2GB", 2 * 10**9),
        ("512k", 512 << 10),
        ("3 kb", 3000),
        ("1TiB", 1 << 40),
        ("7B", 7),
        ("0", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Units of 1024 and of 1000."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "lots", "-1", "1e6", "1.GiB", ".5G", "5i", "5iB", "1,000", "1 G i B", "٣", "_1"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(
        ValueError, match="is not a number of bytes; expected such as 64MiB, 2GB or 1_000_000"
    ):
        parse_bytes(text)


@pytest.mark.parametrize(
    "name", [n for n in ServerSettings.model_fields if n.endswith("_bytes") or n == "hbm_budget"]
)
def test_every_size_of_the_server_is_taken_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment as on the command line."""
    monkeypatch.setenv(f"TABLESIDE_{name.upper()}", "1.5GiB")
    more = (
        {"devices": "0"}
        if name == "hbm_budget"
        else {}
        if name == "max_in_flight_bytes"
        else {"max_in_flight_bytes": "1TB"}
    )
    assert getattr(ServerSettings(**more), name) == 3 << 29
