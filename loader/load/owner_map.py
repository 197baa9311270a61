"""Proposes which tables of a model other hosts have, for hosts with so much memory.

Each host has a share of the large tables, as an owner, and all of the small ones, as a server of the whole.
Tables are cut from the largest on, until a share and the rest fit into a host. Of the numbers of owners that
fit, it takes the one whose busiest host gives fewest rows, and the smallest of equals. Hosts that are left
are replicas of the owners that are asked most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tableside.loader.errors import ModelError
from tableside.loader.load.sizes import SizedModel, SizedTable

_MOST_OWNERS = 1 << 10  # that an error may propose


@dataclass(frozen=True)
class HostRoom:
    """What hosts have. memory_bytes: of each; versions: that lie there at once while one is loaded; replicas:
    hosts of each owner, at least."""

    hosts: int
    memory_bytes: int
    versions: int
    replicas: int = 1

    @property
    def version_bytes(self) -> int:
        """Returns what one version may take of a host."""
        return self.memory_bytes // self.versions


@dataclass(frozen=True)
class OwnerMap:
    """A proposal. tables: those that are cut, none: each host has the whole model. local_bytes: of a version
    with the others; share_bytes, load: of each owner's version, and its part of the rows that are asked of
    all. hosts: of each owner, by number. is_counted: the loads are of counts; else of the rows there are."""

    tables: tuple[SizedTable, ...]
    local_bytes: int
    share_bytes: tuple[int, ...]
    load: tuple[float, ...]
    hosts: tuple[tuple[int, ...], ...]
    is_counted: bool

    def host_load(self, owner: int) -> float:
        """Returns the part of the rows asked of all owners that each host of this one gives."""
        return self.load[owner] / len(self.hosts[owner])


@dataclass(frozen=True)
class _Cut:
    """tables: cut; the others of a model, whole, take local_bytes."""

    model: SizedModel
    tables: tuple[SizedTable, ...]
    local_bytes: int

    @property
    def most_owners(self) -> int:
        return min(t.most_owners for t in self.tables)

    def shares(self, owners: int) -> list[int]:
        return [self.model.share_bytes(self.tables, number, owners) for number in range(owners)]

    def needed(self, owners: int) -> int:
        """Returns the bytes of a version on the fullest host."""
        return self.local_bytes + max(self.shares(owners))

    def fitting(self, room: int, most: int) -> Iterator[int]:
        """Yields the numbers of owners, from 2 to `most`, of whom each fits."""
        if (left := room - self.local_bytes) <= 0:
            return
        first = max(2, -(-sum(t.cut(0, 1).bytes for t in self.tables) // left))
        for owners in range(first, min(most, self.most_owners) + 1):
            if all(self.model.share_bytes(self.tables, n, owners) <= left for n in range(owners)):
                yield owners


def propose(model: SizedModel, room: HostRoom) -> OwnerMap:
    """Returns a map. ModelError: the model does not fit, and what would hold it."""
    whole, most = model.bytes(model.tables), room.hosts // room.replicas
    if whole <= room.version_bytes:
        return OwnerMap((), whole, (), (), (), False)
    cuts = list(_cuts(model))
    for cut in cuts:
        if found := [_mapped(cut, owners, room) for owners in cut.fitting(room.version_bytes, most)]:
            return min(found, key=lambda m: round(room.hosts * max(map(m.host_load, range(len(m.hosts)))), 2))
    raise ModelError(_does_not_fit(model, cuts, room, whole))


def _mapped(cut: _Cut, owners: int, room: HostRoom) -> OwnerMap:
    load, is_counted = _load(cut.tables, owners)
    shares = tuple(cut.shares(owners))
    return OwnerMap(cut.tables, cut.local_bytes, shares, load, _hosts(load, room), is_counted)


def _cuts(model: SizedModel) -> Iterator[_Cut]:
    """Yields which tables may be cut: the largest, the two largest, and so on."""
    sizes = {t.name: t.cut(0, 1).bytes for t in model.tables}
    large = sorted((t for t in model.tables if t.most_owners > 1), key=lambda t: -sizes[t.name])
    for count in range(1, len(large) + 1):
        names = {t.name for t in large[:count]}
        tables = tuple(t for t in model.tables if t.name in names)
        yield _Cut(model, tables, model.bytes(t for t in model.tables if t.name not in names))


def _load(tables: Sequence[SizedTable], owners: int) -> tuple[tuple[float, ...], bool]:
    """Returns each owner's part of the rows that are asked for, and whether they were counted."""
    if all(t.uses is not None for t in tables):
        counted = [sum(t.uses(n, owners) for t in tables if t.uses is not None) for n in range(owners)]
        if total := sum(counted):
            return tuple(n / total for n in counted), True
    rows = [sum(t.cut(n, owners).id_count for t in tables) for n in range(owners)]
    return tuple(n / max(1, sum(rows)) for n in rows), False


def _hosts(load: Sequence[float], room: HostRoom) -> tuple[tuple[int, ...], ...]:
    """Returns the hosts of each owner: each further one goes to the owner whose hosts give most rows."""
    found = [list(range(k, len(load) * room.replicas, len(load))) for k in range(len(load))]
    for host in range(len(load) * room.replicas, room.hosts):
        found[max(range(len(load)), key=lambda k: load[k] / len(found[k]))].append(host)
    return tuple(map(tuple, found))


def _does_not_fit(model: SizedModel, cuts: Sequence[_Cut], room: HostRoom, whole: int) -> str:
    """Says what would hold a model."""
    most = room.hosts // room.replicas
    possible = [(cut, n) for cut in cuts if (n := min(most, cut.most_owners)) > 1]
    needed = room.versions * min([whole, *(cut.needed(n) for cut, n in possible)])
    remedies = [f"--memory {-(-needed // (1 << 20))}MiB"]
    enough = [n for cut in cuts for n in islice(cut.fitting(room.version_bytes, _MOST_OWNERS), 1)]
    if enough:
        remedies.insert(0, f"--hosts {min(enough) * room.replicas}")
    fixed = [t.name for t in model.tables if t.most_owners == 1]
    why = f"; tables that cannot be cut: {', '.join(fixed)}" if fixed and not enough else ""
    each = f"{room.versions} versions of {needed // room.versions:,} bytes each"
    return (
        f"model {model.header.model!r} does not fit {room.hosts} hosts of {room.memory_bytes:,} bytes, which "
        f"hold {room.versions} versions while one is loaded (--keep): the fullest host needs {each}{why}; "
        f"expected {' or '.join(remedies)}"
    )
