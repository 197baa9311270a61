"""A small scorer, exported as a user would."""

import pytest
from scorers import Ctr, exported


@pytest.fixture(scope="module")
def program() -> bytes:
    """A .pt2 file of two features and a dense tensor."""
    return exported(Ctr(8, 4, 3), user=8, clicked=4, context=3)
