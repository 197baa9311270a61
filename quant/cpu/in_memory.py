"""Lookups of fetched tables (`quant.rows.fetched`) whose rows all lie in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Ids, Lookup, LookupKind, Place, Plan, Planner, Table, Unfound
from tableside.quant.cpu.address_space import BASE, MEMORY, offset_of
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.rows.fetched import FetchedTable

if TYPE_CHECKING:
    from tableside.quant.cpu.backend import CpuBackend

_MANY_IDS = 4096  # for fewer, finding rows again takes less than other places do
FIELD = {name: n for n, name in enumerate(Place._fields)}
# Whether a field is an offset into the inputs, or into the outputs
_OF_INPUTS = np.array([name in ("ids_at", "lengths_at", "weights_at") for name in Place._fields], np.int64)
_OF_OUTPUTS = np.array([name in ("out_at", "found_at") for name in Place._fields], np.int64)


class InMemory:
    """Plans lookups whose rows all lie in memory now. To see whether they are here, ids of fetched tables
    become row numbers; a lookup then reads by these, if no id may be missing."""

    def __init__(
        self,
        backend: "CpuBackend",
        kinds: Sequence[Lookup | LookupKind],
        tables: Sequence[Table],
        threads: int,
    ) -> None:
        """tables: of each kind, in memory."""
        spans = [
            _numbered(table) if table is not kind.table else (0, table)
            for kind, table in zip(kinds, tables, strict=True)
        ]
        self._first = [first for first, _ in spans]

        def planner(tables: Sequence[Table]) -> Planner:
            of_kind = [
                LookupKind(table, kind.pooling, kind.precision)
                for kind, table in zip(kinds, tables, strict=True)
            ]
            return backend.memory_planner(of_kind, threads)

        self._planner = planner(tables)
        self._by_number = planner([table for _, table in spans]) if backend.reads_any_rows else None

    def plan(
        self, asked: Sequence[tuple[Lookup | LookupKind, Place]], places: Any, inputs: Any
    ) -> Plan | None:
        """Returns a plan that reads rows where they lie in memory; None: some do not. Ids may be missing, or
        wrong."""
        by_number, numbers = self._by_number, dict[int, Ids]()
        for job, (kind, place) in enumerate(asked):
            if not isinstance(table := kind.table, FetchedTable):
                continue
            if (are_here := table.reader.are_here) is None:
                return None
            ids = np.frombuffer(inputs, np.int64, place.ids, place.ids_at)
            if (row_map := table.row_map) is None:
                if not are_here(ids):
                    return None
                continue
            numbers[job] = rows = np.empty(place.ids, np.int64)
            doubtful = place_rows(row_map, ids, rows, table.rows)
            if not are_here(rows):
                return None
            if doubtful:
                by_number = None
                if row_map.default_row is not None and not are_here(np.array([row_map.default_row])):
                    return None
            rows -= self._first[place.kind]
        if by_number is None or sum(rows.size for rows in numbers.values()) < _MANY_IDS:
            return self._planner.plan(places)
        return _NumberedPlan(self, by_number, places, numbers)


class _NumberedPlan(Plan):
    """owner: keeps the rows mapped. numbers: of rows, instead of the ids of a lookup, by its number."""

    def __init__(self, owner: InMemory, planner: Planner, places: Any, numbers: Mapping[int, Ids]) -> None:
        self._owner, self._planner, self._numbers = owner, planner, numbers
        self._places = np.frombuffer(places, np.int64).reshape(-1, len(Place._fields))

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        places = places_in_memory(self._places, inputs, outputs, self._numbers)
        return self._planner.run(places.tobytes(), MEMORY, MEMORY)


def places_in_memory(
    places: NDArray[np.int64], inputs: Any, outputs: Any, numbers: Mapping[int, Ids]
) -> NDArray[np.int64]:
    """Returns places [n, fields of `Place`] as offsets into `MEMORY`. numbers: what lookups read instead of
    ids."""
    starts = offset_of(inputs) * _OF_INPUTS + offset_of(outputs) * _OF_OUTPUTS
    places = places + (places >= 0) * starts
    for job, rows in numbers.items():
        places[job, FIELD["ids_at"]] = rows.__array_interface__["data"][0] - BASE
    return places


def _numbered(table: Table) -> tuple[int, Table]:
    """Returns the smallest number of a row of a table or of its overlay, and a table without a map of all
    that lies from there on."""
    if table.row_map is None or table.row_map.overlay is None:
        return 0, replace(table, row_map=None)
    layers = table.row_map.overlay.layers
    first = min(0, *(layer.first_row for layer in layers))
    end = max(table.rows, *(layer.first_row + layer.index.slots for layer in layers))
    at = table.address + first * table.row_bytes
    everything = np.frombuffer(memoryview(MEMORY), np.uint8, (end - first) * table.row_bytes, at - BASE)
    return first, replace(table, packed=everything.reshape(end - first, table.row_bytes), row_map=None)
