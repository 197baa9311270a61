"""A server with two workers that speaks gRPC, and clients of it."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_calls import TOKEN
from servers import Server, running
from triton_grpc import triton


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("grpc")
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    options = ("--workers", 2, "--grpc-port", 0, "--allow-client-shm", "--admin-token-file", folder / "token")
    with running(folder, *options) as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc) as found:
        yield found


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as found:
        yield found
