"""Connections to owners."""

from collections.abc import Iterator

import pytest

from tableside.serving.cluster.calls import OwnerHosts


@pytest.fixture
def hosts() -> Iterator[OwnerHosts]:
    """The hosts that this process asks for rows, for 2 s at most."""
    found = OwnerHosts(None, 2.0)
    yield found
    found.close()
