"""The entries of claims and their page fit the tree. Whether tests fail without the code is tried by `make claims` alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from campaigns.claims.entries import BadEntry, Claim, Cut, problems, read_claims
from campaigns.claims.page import PAGE, render
from campaigns.claims.trial import Outcome, outcome

CLAIMS = read_claims()
GOOD = Claim(
    area="http",
    claim="A test.",
    said_in="docs/claims.md",
    tests=("tests/campaigns/test_claims.py::test_an_entry_that_fits_has_no_problem",),
    cuts=(Cut("campaigns/claims/entries.py", "FOLDER = Path(__file__).parent\n"),),
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.area}: {claim.claim}"[:70])
def test_an_entry_fits_the_tree(claim: Claim) -> None:
    """Its document says it, its tests exist, and what is taken out occurs once and leaves a file that compiles."""
    assert list(problems(claim)) == []


def test_the_page_is_written_from_the_entries() -> None:
    """Remedy: python -m campaigns.claims --write."""
    assert PAGE.read_text() == render(CLAIMS)


def test_no_claim_stands_twice() -> None:
    sentences = [claim.claim for claim in CLAIMS]
    assert sorted(sentences) == sorted(set(sentences))


def test_an_entry_that_fits_has_no_problem() -> None:
    assert list(problems(GOOD)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"said_in": "docs/nothing.md"}, "docs/nothing.md does not exist"),
        ({"quote": "never said"}, "docs/claims.md does not say: never said"),
        ({"tests": ("tests/campaigns/test_claims.py::test_nothing",)}, "there is no test"),
        ({"tests": ("tests/nothing.py::test_nothing",)}, "there is no test"),
        ({"cuts": (Cut("campaigns/claims/entries.py", "import"),)}, "times, expected once"),
        ({"cuts": (Cut("campaigns/claims/entries.py", "not in the file"),)}, "has 0 times, expected once"),
        ({"cuts": (Cut("campaigns/claims/entries.py", "\n"),)}, "nothing is taken out"),
        ({"cuts": (Cut("campaigns/claims/nothing.py", "x"),)}, "No such file"),
        ({"cuts": (Cut("campaigns/claims/entries.py", "class BadEntry(Exception):\n"),)}, "unexpected indent"),
        ({"cuts": (Cut("serving/http/_headers.c", "#include <Python.h>"),)}, "build = true is expected"),
        ({"build": True}, "build = false is expected"),
    ],
)
def test_an_entry_that_does_not_fit_is_named(change: dict[str, object], problem: str) -> None:
    found = "\n".join(problems(replace(GOOD, **change)))  # type: ignore[arg-type]
    assert re.search(problem, found), found


def test_an_entry_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "http.toml").write_text('[[claim]]\nclaim = "A."\nsaid_in = "README.md"\ntests = "x"\nfile = "y"\ndelete = "z"\n')
    with pytest.raises(BadEntry, match=r"http.toml: A\..*known keys: test, also"):
        read_claims(tmp_path)


@pytest.mark.parametrize(
    ("code", "told", "expected"),
    [
        (0, "1 passed", Outcome.SURVIVED),
        (1, "FAILED tests/a.py::test_b[x-1] - AssertionError: no", Outcome.FAILED),
        (1, "ERROR tests/a.py::test_b - Failed: the server did not start", Outcome.FAILED),
        (1, "FAILED tests/a.py::test_other - AssertionError", Outcome.SURVIVED),
        (1, "E  NameError: name 'x' is not defined\nFAILED tests/a.py::test_b - NameError", Outcome.BROKEN),
        (2, "Interrupted: 1 error during collection", Outcome.BROKEN),
        (4, "not found", Outcome.BROKEN),
        (139, "Segmentation fault", Outcome.BROKEN),
        (None, "", Outcome.HUNG),
    ],
)
def test_a_trial_counts_only_where_the_tests_failed_by_themselves(code: int | None, told: str, expected: Outcome) -> None:
    """Not by an import or a name that is gone with the lines, and every test that is named."""
    claim = replace(GOOD, tests=("tests/a.py::test_b",))
    assert outcome(claim, code, told) is expected
    if code == 139:
        assert outcome(replace(claim, build=True), code, told) is Outcome.CRASHED
    if expected is Outcome.BROKEN and code == 1:
        assert outcome(replace(claim, error="NameError"), code, told) is Outcome.FAILED
