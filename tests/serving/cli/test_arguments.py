"""Values of the command line."""

import argparse

import pytest

from tableside.loader.versions.retention import Retention
from tableside.serving.cli.arguments import retention


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("0", Retention(0)),
        ("12", Retention(12)),
        ("0s", Retention(0, 0)),
        ("90s", Retention(0, 90)),
        ("30m", Retention(0, 1800)),
        ("1h", Retention(0, 3600)),
        ("7d", Retention(0, 604800)),
    ],
)
def test_states_are_kept_by_their_number_or_their_age(text: str, kept: Retention) -> None:
    assert retention(text) == kept


@pytest.mark.parametrize("text", ["", "-1", "1w", "1.5h", "1 h", "h", "\u0663d", "99999999d"])
def test_what_is_neither_is_refused(text: str) -> None:
    """An age is as long as the times of rows go at most, as one of `ttl` is."""
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number of states from 0 on, or an age"):
        retention(text)
