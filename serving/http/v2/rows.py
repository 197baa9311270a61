"""Rows of this host's tables for servers of the whole model (serving.cluster.protocol)."""

import time
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from fastapi import FastAPI, Request, Response

from tableside.loader.segment.blocks import BlockReader
from tableside.loader.segment.remote import HostsState
from tableside.loader.segment.segment import Segment
from tableside.quant.contract import Bytes, Ids, Place, Planner, Table
from tableside.quant.cpu.native import packed_planner
from tableside.quant.cpu.packed import rows_with_ids
from tableside.quant.cpu.staged_rows import fetched
from tableside.quant.errors import RowsNotRead
from tableside.quant.rows.fetched import RowReader
from tableside.serving.cluster.describe import describe
from tableside.serving.cluster.protocol import PATH, RowsLayout, TableIds, seal, unpack_request
from tableside.serving.errors import ApiError, ErrorKind, bad_request, not_found, short
from tableside.serving.http import asgi
from tableside.serving.http.origins import is_loopback
from tableside.serving.http.v2.kept_states import KeptStates
from tableside.serving.http.v2.repository import has_token
from tableside.serving.metrics.disk import count_given
from tableside.serving.service.service import Service

INLINE_BYTES = 4 << 20  # of a response up to which rows are copied on the event loop: some 5 ms


class OwnedRows:
    """Answers requests for rows, from whichever state they name."""

    def __init__(self, service: Service) -> None:
        self._service, self._states = service, KeptStates()
        self._planners: WeakKeyDictionary[Segment, Planner] = WeakKeyDictionary()

    def check(self, http: Request) -> None:
        """ApiError: the caller gets no rows."""
        token = self._service.cluster_token
        if token is not None:
            if not has_token(asgi.header(http.scope, b"authorization"), token):
                why = "rows are given to servers of this cluster alone: the request's Authorization is not "
                raise ApiError(401, ErrorKind.DENIED, f"{why}'Bearer ' and the cluster token")
        elif http.client is not None and not is_loopback(http.client.host):
            why = "rows are given to other hosts by a server with a cluster token; start it with "
            raise ApiError(403, ErrorKind.DENIED, f"{why}--cluster-token-file FILE")

    def describe(self, model: str) -> dict[str, Any]:
        found = describe(self._service.live(model).segment)
        if found is None:
            raise not_found(f"model {short(model)} is whole; rows are given of a model's shares")
        return found.to_json()

    async def states(self, model: str) -> list[str]:
        return [str(state) for state in await self._states.known(self._service.engine(model))]

    async def keep(self, model: str, named: str) -> None:
        """Keeps a state for some seconds. ApiError: it is none, or not here."""
        await self._states.segment(self._service.engine(model), self._state(model, named))

    def _state(self, model: str, named: str) -> HostsState:
        try:
            return HostsState.parse(named)
        except ValueError as error:
            what = f"rows of {short(model)}: the state is {error}"
            raise bad_request(f"{what}, as GET {PATH}/MODEL/states says") from error

    async def answer(self, model: str, named: str, body: bytes) -> asgi.Response:
        """Returns the rows that a request names. ApiError: it is none, the state is not here, or rows of a
        disk are late or damaged."""
        state = self._state(model, named)
        segment = await self._states.segment(self._service.engine(model), state)
        stored = segment.header.tables
        try:
            asked = unpack_request(body, len(stored))
        except ValueError as error:
            raise bad_request(f"rows of {short(model)}: {error}") from error
        layout = RowsLayout.of([(one.ids.size, stored[one.table].row_bytes) for one in asked])
        if layout.size > (limit := self._service.settings.max_response_bytes):
            what = f"the request asks for {layout.size:,} bytes of rows; the limit is {limit:,}"
            raise ApiError(413, ErrorKind.TOO_LARGE, f"{what} (max_response_bytes): ask in parts")
        arguments = segment, asked, layout, body, state
        if segment.readers:
            rows = await self._service.readers.run(partial(self._rows, *arguments))
        elif layout.size > INLINE_BYTES:
            rows = await self._service.beside(self._rows, *arguments)
        else:
            rows = self._rows(*arguments)
        count_given(model, sum(one.ids.size for one in asked))
        headers = ((b"content-type", b"application/octet-stream"),)
        return asgi.Response(200, headers, [rows.data])

    def _rows(
        self, segment: Segment, asked: list[TableIds], layout: RowsLayout, body: bytes, state: HostsState
    ) -> Bytes:
        """Returns the body of a response."""
        stored = segment.header.tables
        out = np.empty(layout.size, np.uint8)
        out[layout.found_at[-1] + asked[-1].ids.size : layout.rows_at[0]] = 0
        deadline = time.monotonic() + self._service.settings.disk_timeout_s
        in_memory, ids_at = [], len(body) - 8 * sum(one.ids.size for one in asked)
        for one, found_at, rows_at in zip(asked, layout.found_at, layout.rows_at, strict=True):
            n, name = one.ids.size, stored[one.table].name
            if name in segment.readers:
                found = out[found_at : found_at + n]
                rows = out[rows_at : rows_at + n * stored[one.table].row_bytes].reshape(n, -1)
                _read(segment.tables[name], segment.readers[name], one.ids, found, rows, deadline)
            else:
                in_memory.append(Place(one.table, ids_at, n, -1, 0, 0, -1, rows_at, 0, found_at))
            ids_at += 8 * n
        if in_memory:
            self._planner(segment).run(np.array(in_memory, np.int64).tobytes(), body, out)
        seal(out, state)
        return out

    def _planner(self, segment: Segment) -> Planner:
        if segment not in self._planners:
            tables = [segment.tables[t.name] for t in segment.header.tables]
            self._planners[segment] = packed_planner(tables)
        return self._planners[segment]


def _read(table: Table, reader: BlockReader, ids: Ids, found: Bytes, rows: Bytes, deadline: float) -> None:
    """Reads rows of a disk to found [n] and rows [n, row_bytes]. ApiError: they are late or damaged."""
    found[:], numbers = rows_with_ids(table, ids)
    try:
        came, at = fetched(table.fetched_by(RowReader(reader)), numbers, reader, deadline)
    except RowsNotRead as error:
        raise ApiError(503, ErrorKind.NOT_READ, f"rows of a table on a disk: {error}") from error
    rows[:] = came.packed[at]
    rows[found == 0] = 0


def add_to(app: FastAPI, service: Service) -> None:
    owned = OwnedRows(service)

    @app.get(f"{PATH}/{{model}}", include_in_schema=False)
    async def described(http: Request) -> Response:
        owned.check(http)
        return asgi.json_response(owned.describe(http.path_params["model"]))

    @app.get(f"{PATH}/{{model}}/states", include_in_schema=False)
    async def states(http: Request) -> Response:
        owned.check(http)
        return asgi.json_response(await owned.states(http.path_params["model"]))

    @app.get(f"{PATH}/{{model}}/{{state}}", include_in_schema=False)
    async def kept(http: Request) -> Response:
        owned.check(http)
        await owned.keep(http.path_params["model"], http.path_params["state"])
        return asgi.json_response({})

    @app.post(f"{PATH}/{{model}}/{{state}}", include_in_schema=False)
    async def rows(http: Request) -> Response:
        owned.check(http)
        named, hold = http.path_params, http.scope[asgi.HOLD]
        body = await asgi.read_body(http.scope, http.receive, service.settings.max_body_bytes, hold)
        return asgi.AsgiResponse(await owned.answer(named["model"], named["state"], body))
