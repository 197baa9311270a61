"""Ray, which sends nobody statistics and leaves the environment's GPUs as they are. ServingError on import:
it is not installed."""

import os

from tableside.serving.errors import ServingError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
except ImportError as error:
    raise ServingError(
        f"ray does not import ({error}); install tableside[ray], or leave out --engine ray"
    ) from error

__all__ = ["ray"]
