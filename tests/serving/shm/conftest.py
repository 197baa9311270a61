"""Objects of shared memory, and a server of the demo model that takes Triton's system shared memory."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.fixture
def make() -> Iterator[Callable[..., Path]]:
    """make(bytes, prefix) -> a new object of shared memory, which goes with the test."""
    made: list[Path] = []

    def run(size: int = 4096, prefix: str = "test") -> Path:
        made.append(Path("/dev/shm") / f"{prefix}-{uuid.uuid4().hex[:12]}")
        made[-1].write_bytes(bytes(size))
        made[-1].chmod(0o600)
        return made[-1]

    yield run
    for path in made:
        path.unlink(missing_ok=True)
