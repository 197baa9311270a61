"""What goes wrong in the client's calls."""


class ClientError(Exception):
    """The server refused a request. status: of the HTTP response; 0: the server could not be reached."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message

    def __str__(self) -> str:
        return self.message if self.status == 0 else f"{self.status}: {self.message}"


class FeatureError(ValueError):
    """A feature's ids, lengths or weights, or a dense tensor, cannot be sent as they were given."""
