"""Errors of `quant`: what was expected, what came, where, and the remedy."""

from enum import StrEnum


class QuantError(ValueError):
    """Values, shapes or a choice of backend that cannot be served."""


class MissingBackend(QuantError):
    """A backend was asked for that this installation does not have."""


class NotRepresentable(QuantError):
    """A row holds a value that the row format cannot represent: not finite, or outside its range. largest:
    for people; empty: the row is packed in that format, and damaged."""

    def __init__(self, row: int, row_format: str, largest: str) -> None:
        super().__init__(row, row_format, largest)
        self.row, self.row_format, self.largest = row, row_format, largest

    def __str__(self) -> str:
        return self.describe(self.row)

    def describe(self, row: int) -> str:
        """The error as a sentence about row number `row`."""
        if not self.largest:
            return (
                f"row {row} holds a value of {self.row_format} that is no number, or a scale that is none, "
                "negative or too large; repair the checkpoint"
            )
        return (
            f"row {row} holds a value that {self.row_format} cannot represent (not finite, or outside "
            f"{self.largest}); "
            "repair the checkpoint, or choose another row format"
        )


class RowsNotRead(QuantError):
    """Rows of a table that is not in memory did not come. rows: asked for; late: of them, not within the
    deadline; corrupt: not what was written."""

    def __init__(self, rows: int, late: int, corrupt: int) -> None:
        super().__init__(rows, late, corrupt)
        self.rows, self.late, self.corrupt = rows, late, corrupt

    def __str__(self) -> str:
        return (
            f"of {self.rows} rows to fetch {self.late} came too late and {self.corrupt} were damaged; ask "
            "again, or look at the store that has them"
        )


class Problem(StrEnum):
    """Why ids were refused."""

    ID = "id"  # outside [0, rows)
    MISSING = "missing"  # the table has no row for it, and refuses such ids
    LENGTH = "length"  # negative
    SUM = "sum"  # the lengths do not add up to the number of ids
    CHANGED = "changed"  # what was wrong is not there any more


class BadIds(QuantError):
    """Ids or lengths that cannot be looked up; nothing was read.
    job: number of the lookup in the plan; position: index into its ids (ID, MISSING) or lengths (LENGTH), or
    the number of bags (SUM); value: the id, the length, or the sum of lengths; bound: the table's rows (ID)
    or ids (MISSING), the lookup's ids (SUM), 0 (LENGTH)."""

    def __init__(self, problem: Problem, job: int, position: int, value: int, bound: int) -> None:
        super().__init__(problem, job, position, value, bound)
        self.problem, self.job, self.position, self.value, self.bound = problem, job, position, value, bound

    def __str__(self) -> str:
        return self.describe("ids")

    def describe(self, name: str, id_: str = "id") -> str:
        """The error as a sentence about the feature `name`. id_: what its ids are called."""
        if self.problem is Problem.ID:
            at = f"id {self.value} at position {self.position}"
            return f"{name}: {at} is outside the table's rows [0, {self.bound})"
        if self.problem is Problem.MISSING:
            return (
                f"{name}: {id_} {self.value} at position {self.position} is not among the table's "
                f"{self.bound:,} ids; send ids that it has, or publish the table with a policy for "
                "missing ids"
            )
        if self.problem is Problem.CHANGED:
            return (
                f"{name}: an id or a length was wrong, and changed while it was looked up; "
                "leave inputs as they are until then"
            )
        if self.problem is Problem.LENGTH:
            return f"{name}: length {self.value} at position {self.position} is negative; expected 0 or more"
        return f"{name}: the {self.position} lengths add up to {self.value}, but there are {self.bound} ids"


Refused = BadIds | RowsNotRead  # what a request of a batch may get for vectors
