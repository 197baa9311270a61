"""Offline evaluation: a pool of processes scores data sets over the published segment."""

from tableside.serving.errors import ServingError

try:
    import pyarrow  # noqa: F401  (said here once, for all modules of this folder)
except ImportError as error:
    raise ServingError(
        f"an evaluation needs pyarrow, which does not import ({error}); install tableside[eval]"
    ) from error
