"""Plans which rows and indexes of a version's tables lie in a device's memory, within a budget."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from tableside.quant.errors import QuantError
from tableside.quant.gpu.residence.memory import InHost
from tableside.quant.gpu.residence.registry import CHOICES, ON_DISK, OVER_DISK, read_from_disk, residence
from tableside.quant.gpu.residence.residence import Home, TableSize
from tableside.quant.row_format import GPU_ALIGNMENT

_SMALL_PART = (
    4  # a quarter of a budget that does not hold all tables is for small ones, which are copied whole
)
_DELTAS = 16  # a sixteenth of a budget that a cache or split tables take is left for deltas


def without_deltas(budget: int) -> int:
    """Returns the part of a budget, in bytes, that is for a cache or split tables, without the deltas'."""
    return budget - budget // _DELTAS


def choose(
    tables: Iterable[TableSize], wanted: str, budget: int, home: Home, stay: Collection[str] = ()
) -> dict[str, str]:
    """Maps table names to kinds of residences. wanted: a placement, of CHOICES. Where its kinds mix and all
    tables do not fit into the first, the smallest do: in a quarter of the budget, if the kind of the others
    takes the rest. Of those that do not, the stored ones stay on their disk, and so do the tables of `stay`,
    whatever fits. A cache that was asked for reads stored tables of row numbers from their disk. QuantError:
    the only kind does not fit."""
    if stay:
        found = choose(tables, wanted, budget, home)
        return found | dict.fromkeys(set(stay).difference(read_from_disk(found)), ON_DISK)
    tables = list(tables)
    kinds, mixes = CHOICES[wanted]
    fitting = [kind for kind in kinds if residence(kind).fits(tables, budget, home)]
    if mixes and kinds[0] not in fitting:
        return _mixed(tables, kinds, budget, home)
    chosen = fitting[0] if fitting else kinds[-1]
    if (needed := residence(chosen).needs(tables)) > budget:
        raise QuantError(
            f"placement {chosen} needs {needed:,} bytes, the budget of this worker is {budget:,}; give it "
            "more, or choose placement auto"
        )
    return {t.name: _over_disk(t, chosen) if t.is_stored else chosen for t in tables}


def _over_disk(t: TableSize, kind: str) -> str:
    if kind not in OVER_DISK:
        return kind
    return OVER_DISK[kind] if t.has_row_numbers else ON_DISK


def _mixed(tables: Sequence[TableSize], kinds: Sequence[str], budget: int, home: Home) -> dict[str, str]:
    """The smallest tables in the first kind, the others in the first of the others that fits, or on their
    disk. What all tables of the host leave is for the stored ones."""
    of_host = [t for t in tables if not t.is_stored]
    if residence(kinds[0]).fits(of_host, budget, home):
        chosen, left, others = dict.fromkeys((t.name for t in of_host), kinds[0]), budget, ON_DISK
        left -= residence(kinds[0]).needs(of_host)
        tables = [t for t in tables if t.is_stored]
    else:
        chosen = {}
        left = max(0, budget - sum(t.index_bytes for t in of_host))  # which are copied wherever the rows lie
        part = left // _SMALL_PART
        for others in kinds[1:]:
            takes_rest = residence(others).takes_rest(home)
            if residence(others).fits(of_host, left - part, home):
                break
        left = part if takes_rest else left
    for t in sorted(tables, key=lambda t: t.bytes):
        size = residence(kinds[0]).needs([t]) - (0 if t.is_stored else t.index_bytes)
        chosen[t.name] = kinds[0] if size <= left else ON_DISK if t.is_stored else others
        left -= size if size <= left else 0
    return chosen


def check_padding(tables: Iterable[TableSize], kinds: Mapping[str, str]) -> None:
    """Raises QuantError if a device would read rows in host memory that are not padded for it."""
    if tight := [t for t in tables if t.row_bytes % residence(kinds[t.name]).host_alignment]:
        names, first = ", ".join(t.name for t in tight), tight[0]
        raise QuantError(
            f"placement {kinds[first.name]} reads rows in host memory; those of table {names} take "
            f"{first.row_bytes} bytes, and are not padded for that: load the model with row_alignment = "
            f"{GPU_ALIGNMENT}, as a load on a machine with a GPU does, give the worker a larger budget, or "
            "choose placement host"
        )


def plan_indexes(
    tables: Sequence[TableSize], kinds: Mapping[str, str], left: int, home: Home, is_successor: bool
) -> tuple[dict[str, InHost], int]:
    """Returns each table's index part in host memory, and the HBM of all indexes. left: of a budget. Beside
    rows that take the rest of it, copied ids take half of that. For a successor the largest indexes move to
    host memory if needed. QuantError: what must be copied does not fit."""
    of = {t.name: residence(kinds[t.name]) for t in tables}
    whole = [t for t in tables if of[t.name].is_whole]
    others = [t for t in tables if of[t.name].is_on_device and not of[t.name].is_whole]
    least = sum(t.whole_index_bytes for t in whole) + sum(t.index_bytes for t in others)
    rest = left - least - sum(t.hbm_bytes for t in whole)
    in_host: dict[str, InHost] = {}
    for t in sorted(others, key=lambda t: t.rows, reverse=True) if is_successor else ():
        if rest < 0 and t.index_bytes:
            in_host[t.name], least, rest = InHost.ALL, least - t.index_bytes, rest + t.index_bytes
    if least and rest < 0:
        raise QuantError(
            f"the id indexes of this version's tables take {least:,} bytes of HBM at least; the budget of "
            f"this worker leaves {max(0, rest + least):,}; give it more, or choose placement host"
        )
    shares_it = any(kind.takes_rest(home) for kind in of.values())
    others = [t for t in others if t.name not in in_host]
    copied = with_copied_ids(others, rest // 2 if shares_it else rest)
    in_host |= {t.name: InHost.NOTHING if t.name in copied else InHost.SOME for t in others}
    return in_host, least + sum(t.id_bytes for t in others if t.name in copied)


def with_copied_ids(tables: Iterable[TableSize], budget: int) -> frozenset[str]:
    """Returns the tables, not wholly in HBM, that copy their ids there: smallest first within the budget."""
    names, left = [], budget
    for t in sorted(tables, key=lambda t: t.rows):
        left -= t.id_bytes
        if left >= 0:
            names.append(t.name)
    return frozenset(names)
