"""What can go wrong with bytes, each error with what was expected, what came, where, and the remedy."""


class LoaderError(Exception):
    """Base of everything that this room raises for a caller's or a file's fault."""


class ModelError(LoaderError):
    """model.toml says something that cannot be built."""


class CheckpointError(LoaderError):
    """A checkpoint that cannot be read, or does not hold what model.toml names."""


class SegmentError(LoaderError):
    """A segment that is truncated, corrupt or of another format version."""


class DamagedRows(SegmentError):
    """Bytes of a segment, or of a table's file, that changed after they were written. file: its name."""

    def __init__(self, message: str, file: str = "") -> None:
        super().__init__(message)
        self.file = file


class VersionError(LoaderError):
    """A model or version that is not published, or may not be changed now."""


class AccessError(LoaderError):
    """A folder or a file of published models that another user of the machine made, or could change."""


class NoSpace(LoaderError):
    """Shared memory is too small for what was asked."""


class RedisError(LoaderError):
    """A Redis that is to have rows, and is not reached, or refuses them."""


class RegistrationError(LoaderError):
    """CUDA does not register a segment's memory."""


class ChangeError(LoaderError):
    """Changes of rows that cannot be read, or do not fit the model; none of their batch was applied."""


class ProgramError(LoaderError):
    """A scorer that is not a plain exported program, or does not fit the model's features."""
