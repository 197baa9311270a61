"""A server of the demo model that takes Triton's system shared memory, and an unchanged tritonclient."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tritonclient.http as triton
from servers import Server, running
from shared_objects import BYTES, Shared
from tritonclient.utils import shared_memory as shm


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers, for the tests of one file."""
    with running(
        tmp_path_factory.mktemp("demo"), "--workers", 2, "--allow-client-shm", "--max-body-bytes", BYTES
    ) as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    """No region is left behind."""
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as found:
        yield found
        found.unregister_system_shared_memory()


@pytest.fixture
def share(client: Any) -> Iterator[Callable[..., Shared]]:
    """share(name) -> an object of shared memory that goes with the test, registered unless is_registered
    is false."""
    made: list[Shared] = []

    def run(name: str = "r", size: int = BYTES, is_registered: bool = True) -> Shared:
        made.append(Shared(client, name, size))
        if is_registered:
            made[-1].register(size)
        return made[-1]

    yield run
    for one in made:
        with contextlib.suppress(FileNotFoundError):  # the test removed it
            shm.destroy_shared_memory_region(one.handle)
