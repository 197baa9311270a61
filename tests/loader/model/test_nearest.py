"""Which name a user probably meant."""

import pytest

from tableside.loader.model.nearest import did_you_mean, nearest

NAMES = ("--root", "--port", "--workers", "--max-body-bytes", "ads", "Demo")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--prot", "--port"),  # swapped: one slip; --root is two
        ("--por", "--port"),
        ("--wrokers", "--workers"),
        ("--max-bytes", None),  # half of the name is missing
        ("--MAX-BODY-BYTE", "--max-body-bytes"),
        ("demo", "Demo"),
        ("asd", "ads"),
        ("x", None),
        ("", None),
    ],
)
def test_the_nearest_name(typed: str, meant: str | None) -> None:
    """A slip for every three characters, and one in a short name."""
    assert nearest(typed, NAMES) == meant


def test_nothing_is_known() -> None:
    assert nearest("x", []) is None and did_you_mean("ads", []) == ""


def test_a_prefix_does_not_count() -> None:
    """Names that begin alike are not alike for that."""
    known = ("TABLESIDE_ROOT", "TABLESIDE_PORT")
    assert did_you_mean("TABLESIDE_PROT", known, "TABLESIDE_") == "; did you mean 'TABLESIDE_PORT'?"
    assert did_you_mean("TABLESIDE_ZZZ", known, "TABLESIDE_") == "" != did_you_mean("TABLESIDE_ZZZ", known)
