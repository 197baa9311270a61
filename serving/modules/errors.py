"""The errors of PyTorch modules."""

from tableside.quant import BadIds, QuantError
from tableside.serving.errors import ServingError


class ModuleError(ServingError, ValueError):
    """A module that cannot be made here, or a call that it does not take."""


class NotATensor(ModuleError, TypeError):
    """A call with lists, arrays or numbers where tensors are expected."""


class BadFeatureIds(QuantError):
    """Ids or lengths of one feature that cannot be looked up.

    feature: its name. problem, position, value, bound: as those of `quant.BadIds`.
    """

    def __init__(self, feature: str, cause: BadIds) -> None:
        super().__init__(feature, cause)
        self.feature, self.problem = feature, cause.problem
        self.position, self.value, self.bound = cause.position, cause.value, cause.bound

    def __str__(self) -> str:
        feature, cause = self.args
        return str(cause.describe(f"feature {feature!r}"))
