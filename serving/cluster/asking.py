"""Questions to a host that has rows, outside of requests: each waits for its answer."""

import time

from tableside.serving.client.messages import BUSY, HttpRequest, HttpResponse
from tableside.serving.client.sockets import SocketPool
from tableside.serving.cluster.calls import address_of, receive_by
from tableside.serving.errors import ServingError

_TIMEOUT_S = 10.0  # of an answer
_AGAIN_S = 0.2  # between two tries


class AskedHost:
    """A host. address: HOST:PORT. Any thread may call."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address, self._pool = address, SocketPool(address_of(address, token), _TIMEOUT_S)

    def get(self, path: str, most: int, patience_s: float = 0.0) -> memoryview:
        """Returns the body of an answer, of `most` bytes or fewer. patience_s: for which it is asked again
        where it is not reached, or busy. ServingError: it was not reached, or refuses."""
        until = time.monotonic() + patience_s
        while True:
            try:
                if (response := self._ask(path, most)).status == 200:
                    return response.content
                said = f"answered {response.status}: {response.text[:500]!r}"
                if response.status not in BUSY:
                    until = 0.0
            except OSError as error:
                said = f"is not reached ({error}); start it there (tableside serve)"
            if time.monotonic() >= until:
                raise ServingError(f"owner {self.address} {said}, asked for {path}")
            time.sleep(_AGAIN_S)

    def _ask(self, path: str, most: int) -> HttpResponse:
        connection = self._pool.begin(HttpRequest("GET", path), most=most)
        try:
            response = receive_by(connection, time.monotonic() + _TIMEOUT_S)
        except BaseException:
            connection.close()
            raise
        self._pool.give_back(connection, response)
        return response

    def close(self) -> None:
        self._pool.close()
