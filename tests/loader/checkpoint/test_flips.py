"""Changed bits: nothing but the true rows is ever served (campaigns/flips.py, a short run of it)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent.parent))
from campaigns import flips

SEED, CHANGES = 3, 40


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", flips.KINDS)
def test_no_changed_bit_is_served(kind: str) -> None:
    """Of 40 single-bit flips and truncations each is found in one line, or changes nothing that is served."""
    figures = flips.run(CHANGES, SEED, (kind,))
    counts = {outcome: figures[f"{kind}.{outcome}"] for outcome in flips.OUTCOMES}
    print(f"seed {SEED}: {counts}")
    assert figures["failures"] == []
    assert sum(counts.values()) == CHANGES
    assert counts["found"] >= CHANGES // 2  # the changes do reach what matters
