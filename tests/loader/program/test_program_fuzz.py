"""The campaign of tampered programs, short: and that it sees what it looks for."""

import pytest

from campaigns.programs import run

CASES, SEED = 200, 7


@pytest.mark.thorough
def test_tampered_programs_are_refused_or_harmless() -> None:
    """No signal, no score made of bytes that are not the program's, nothing raised but a refusal, no case
    that hangs."""
    found = run(None, SEED, CASES)
    assert found["cases"] == CASES, f"seed {SEED}"
    assert not found["bad"], f"seed {SEED}: {found['bad']}"
    assert found["accepted"] > CASES / 10 and found["refused"] > CASES / 10, found


@pytest.mark.thorough
def test_the_campaign_sees_a_read_beyond_a_weight() -> None:
    """Without the checks a batch norm with fewer statistics than channels ends the child, or changes with
    the canary."""
    found = run(None, 2, 240, checks=False)
    assert found["signals"] + found["foreign_bytes"] > 0, found
