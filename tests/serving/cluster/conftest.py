"""Connections to owners go with the test that made them."""

from collections.abc import Iterator

import pytest

from tableside.serving.cluster.calls import close_hosts


@pytest.fixture(autouse=True)
def no_connections_stay() -> Iterator[None]:
    yield
    close_hosts()
