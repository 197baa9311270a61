"""What this host gives of its tables: rows to servers of the whole model, and files of its states to owners
of another number of them (serving.cluster.protocol)."""

import time
from collections.abc import Coroutine
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray

from tableside.loader.segment.blocks import BlockReader
from tableside.loader.segment.remote import HostsState
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredRows
from tableside.loader.segment.transfer import head_of, stored_range
from tableside.quant.contract import FIELD, Bytes, Ids, Place, Planner, Table, places_in
from tableside.quant.cpu.native import packed_planner
from tableside.quant.cpu.packed import rows_with_ids
from tableside.quant.cpu.staged_rows import fetched
from tableside.quant.errors import RowsNotRead
from tableside.quant.rows.fetched import RowReader
from tableside.serving.cluster.describe import describe
from tableside.serving.cluster.protocol import FILES_PATH, PATH, RowsLayout, TableIds, seal, unpack_request
from tableside.serving.errors import ApiError, ErrorKind, bad_request, not_found, short
from tableside.serving.executors.admission import Hold
from tableside.serving.http import asgi
from tableside.serving.http.origins import is_loopback
from tableside.serving.http.traffic import OTHER
from tableside.serving.http.v2.kept_states import KeptStates
from tableside.serving.http.v2.repository import has_token
from tableside.serving.metrics.disk import count_given
from tableside.serving.model.engine import Engine
from tableside.serving.service.service import Service

INLINE_BYTES = 4 << 20  # of a response up to which rows are copied on the event loop: some 5 ms
_NO_ID = Place(0, 0, 0, -1, 0, 0, -1, 0)


class RowsTarget(NamedTuple):
    """What a request for rows is told by its path and headers. state: as it was named."""

    model: str
    state: str
    authorization: bytes | None

    @property
    def protocol(self) -> str:
        return OTHER


class _Stored(NamedTuple):
    """What is read of a state's tables, in their order. row_bytes: int64 [tables]."""

    planner: Planner
    row_bytes: NDArray[np.int64]


class OwnedRows:
    """Answers requests for rows, from whichever state they name."""

    def __init__(self, service: Service) -> None:
        self._service, self._states = service, KeptStates()
        self._stored: WeakKeyDictionary[Segment, _Stored] = WeakKeyDictionary()

    def check(self, host: str | None, authorization: bytes | None) -> None:
        """ApiError: the caller, a client at a host, gets no rows. host: None: it is at a socket's file."""
        token = self._service.cluster_token
        if token is not None:
            if not has_token(authorization, token):
                why = "rows are given to servers of this cluster alone: the request's Authorization is not "
                raise ApiError(401, ErrorKind.DENIED, f"{why}'Bearer ' and the cluster token")
        elif host is not None and not is_loopback(host):
            why = "rows are given to other hosts by a server with a cluster token; start it with "
            raise ApiError(403, ErrorKind.DENIED, f"{why}--cluster-token-file FILE")

    def check_caller(self, http: Request) -> None:
        """As `check`, of a request that comes through ASGI."""
        self.check(_host(http), asgi.header(http.scope, b"authorization"))

    def describe(self, model: str) -> dict[str, Any]:
        found = describe(self._service.live(model).segment)
        if found is None:
            raise not_found(f"model {short(model)} is whole; rows are given of a model's shares")
        return found.to_json()

    async def states(self, model: str) -> list[str]:
        return [str(state) for state in await self._states.known(self._service.engine(model))]

    async def segment(self, http: Request) -> Segment:
        """Returns the state that a path names, and keeps it for some seconds. ApiError: as `check`, or it is
        none, or not here."""
        self.check_caller(http)
        model, named = http.path_params["model"], http.path_params["state"]
        return await self._states.segment(self._service.engine(model), self._state(model, named))

    def _state(self, model: str, named: str) -> HostsState:
        try:
            return HostsState.parse(named)
        except ValueError as error:
            what = f"rows of {short(model)}: the state is {error}"
            raise bad_request(f"{what}, as GET {PATH}/MODEL/states says") from error

    def answer(
        self, asked: RowsTarget, host: str | None, body: bytes | memoryview, hold: Hold
    ) -> asgi.Response | Coroutine[Any, Any, asgi.Response]:
        """Returns the rows that a request names, or a coroutine that does where they take time. ApiError: as
        `check`, or it is no request, the state is not here, or rows of a disk are late or damaged. `body` may
        be reused on return."""
        self.check(host, asked.authorization)
        engine, state = self._service.engine(asked.model), self._state(asked.model, asked.state)
        segment = self._states.held(engine, state)
        if segment is None or segment.readers:
            return self._answer_later(engine, state, bytes(body), hold)
        ids, layout = self._understand(asked.model, segment, body)
        if layout.size > INLINE_BYTES:
            return self._answer_later(engine, state, bytes(body), hold)
        hold.grow(layout.size)
        return self._given(asked.model, ids, self._rows(segment, ids, layout, body, state))

    async def _answer_later(
        self, engine: Engine, state: HostsState, body: bytes, hold: Hold
    ) -> asgi.Response:
        segment, model = await self._states.segment(engine, state), engine.model.name
        ids, layout = self._understand(model, segment, body)
        hold.grow(layout.size)
        arguments = segment, ids, layout, body, state
        if segment.readers:
            rows = await self._service.readers.run(lambda: self._rows(*arguments))
        else:
            rows = await self._service.beside(self._rows, *arguments)
        return self._given(model, ids, rows)

    def _understand(self, model: str, segment: Segment, body: Any) -> tuple[TableIds, RowsLayout]:
        """Returns what is asked, and where the response has it. ApiError: it is no request, or too large."""
        row_bytes = self._of(segment).row_bytes
        try:
            asked = unpack_request(body, row_bytes.size)
        except ValueError as error:
            raise bad_request(f"rows of {short(model)}: {error}") from error
        layout = RowsLayout.of(asked.counts, row_bytes[asked.tables])
        if layout.size > (limit := self._service.settings.max_response_bytes):
            what = f"the request asks for {layout.size:,} bytes of rows; the limit is {limit:,}"
            raise ApiError(413, ErrorKind.TOO_LARGE, f"{what} (max_response_bytes): ask in parts")
        return asked, layout

    def _given(self, model: str, asked: TableIds, rows: Bytes) -> asgi.Response:
        count_given(model, asked.ids.size)
        return asgi.Response(200, (asgi.BINARY_TYPE,), [rows.data])

    def _rows(
        self, segment: Segment, asked: TableIds, layout: RowsLayout, body: Any, state: HostsState
    ) -> Bytes:
        out = np.empty(layout.size, np.uint8)
        out[layout.ids : layout.rows_at[0]] = 0
        places = np.array([_NO_ID], np.int64).repeat(asked.tables.size, 0)
        places[:, FIELD["kind"]], places[:, FIELD["ids"]] = asked.tables, asked.counts
        places[:, FIELD["ids_at"]] = len(body) - 8 * asked.ids.size + 8 * layout.found_at
        places[:, FIELD["out_at"]], places[:, FIELD["found_at"]] = layout.rows_at, layout.found_at
        if segment.readers:
            stored = segment.header.tables
            on_disk = np.array([stored[n].name in segment.readers for n in asked.tables.tolist()])
            self._read(segment, places[on_disk], asked.ids, out)
            places = places[~on_disk]
        self._of(segment).planner.run(places.tobytes(), body, out)
        seal(out, state)
        return out

    def _read(self, segment: Segment, places: NDArray[np.int64], ids: Ids, out: Bytes) -> None:
        deadline = time.monotonic() + self._service.settings.disk_timeout_s
        for place in places_in(places):
            table = segment.header.tables[place.kind]
            found = out[place.found_at : place.found_at + place.ids]
            rows = out[place.out_at : place.out_at + place.ids * table.row_bytes].reshape(place.ids, -1)
            of_table = ids[place.found_at : place.found_at + place.ids]
            _read(segment.tables[table.name], segment.readers[table.name], of_table, found, rows, deadline)

    def _of(self, segment: Segment) -> _Stored:
        if (found := self._stored.get(segment)) is None:
            tables = [segment.tables[t.name] for t in segment.header.tables]
            row_bytes = np.array([t.row_bytes for t in segment.header.tables], np.int64)
            found = self._stored[segment] = _Stored(packed_planner(tables), row_bytes)
        return found


def _read(table: Table, reader: BlockReader, ids: Ids, found: Bytes, rows: Bytes, deadline: float) -> None:
    """Reads rows of a disk to found [n] and rows [n, row_bytes]. ApiError: they are late or damaged."""
    found[:], numbers = rows_with_ids(table, ids)
    try:
        came, at = fetched(table.fetched_by(RowReader(reader)), numbers, reader, deadline)
    except RowsNotRead as error:
        raise ApiError(503, ErrorKind.NOT_READ, f"rows of a table on a disk: {error}") from error
    rows[:] = came.packed[at]
    rows[found == 0] = 0


def add_to(app: FastAPI, service: Service, owned: OwnedRows) -> None:
    settings = service.settings

    @app.get(f"{PATH}/{{model}}", include_in_schema=False)
    async def described(http: Request) -> Response:
        owned.check_caller(http)
        return asgi.json_response(owned.describe(http.path_params["model"]))

    @app.get(f"{PATH}/{{model}}/states", include_in_schema=False)
    async def states(http: Request) -> Response:
        owned.check_caller(http)
        return asgi.json_response(await owned.states(http.path_params["model"]))

    @app.get(f"{PATH}/{{model}}/{{state}}", include_in_schema=False)
    async def kept(http: Request) -> Response:
        await owned.segment(http)
        return asgi.json_response({})

    @app.post(f"{PATH}/{{model}}/{{state}}", include_in_schema=False)
    async def rows(http: Request) -> Response:
        """What the `Door` leaves, as it is compressed or not allowed."""
        owned.check_caller(http)
        hold, authorization = http.scope[asgi.HOLD], asgi.header(http.scope, b"authorization")
        body = await asgi.read_body(http.scope, http.receive, settings.max_body_bytes, hold)
        asked = RowsTarget(**http.path_params, authorization=authorization)
        found = owned.answer(asked, _host(http), body, hold)
        return asgi.AsgiResponse(found if isinstance(found, asgi.Response) else await found)

    @app.get(f"{FILES_PATH}/{{model}}/{{state}}", include_in_schema=False)
    async def heads(http: Request) -> Response:
        segment = await owned.segment(http)
        found = [head_of(file) for file in _files(segment)]
        sizes = np.array([len(found), *(head.size for head in found)], "<i8")
        return _answer(sizes.view(np.uint8), *found)

    @app.get(f"{FILES_PATH}/{{model}}/{{state}}/{{identity}}/{{chunks}}", include_in_schema=False)
    async def chunks(http: Request) -> Response:
        segment, named = await owned.segment(http), http.path_params
        file, stored, start, stop = _asked(segment, named["identity"], named["chunks"])
        size, limit = (stop - start) * stored.row_bytes, settings.max_response_bytes
        if size > limit:
            what = f"the request asks for {size:,} bytes of chunks; the limit is {limit:,}"
            raise ApiError(
                413, ErrorKind.TOO_LARGE, f"{what} (max_response_bytes): ask for fewer, or raise it"
            )
        if file.readers:  # a disk may take its time
            return _answer(await service.readers.run(lambda: _copied(file, stored, start, stop)))
        return _answer(await service.beside(_copied, file, stored, start, stop))


def _files(segment: Segment) -> list[Segment]:
    return [segment.base, *(delta.segment for delta in segment.deltas)]


def _asked(segment: Segment, identity: str, chunks: str) -> tuple[Segment, StoredRows, int, int]:
    """Returns the file that is named, and its rows. ApiError: it is none of the state's, or has no such
    chunks."""
    of = next((f for f in _files(segment) if f"{f.files[0].identity:016x}" == identity), None)
    if of is None:
        raise not_found(
            f"no file of this state is {short(identity)}: it was compacted meanwhile, so that other files "
            "have its rows; begin with its heads again"
        )
    try:
        first, end = map(int, chunks.split("-"))
        return of, *stored_range(of.header, first, end)
    except ValueError as error:
        raise bad_request(f"chunks {short(chunks)}: {error}; expected FIRST-END") from error


def _copied(file: Segment, stored: StoredRows, start: int, stop: int) -> Bytes:
    ((_, rows),) = file.rows(stored, start, stop)
    return rows.reshape(-1).copy()


def _answer(*parts: Any) -> Response:
    return asgi.AsgiResponse(asgi.Response(200, (asgi.BINARY_TYPE,), [part.data for part in parts]))


def _host(http: Request) -> str | None:
    return None if http.client is None else http.client.host
