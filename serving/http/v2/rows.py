"""Rows of this host's tables for servers of the whole model (serving.cluster.protocol)."""

import asyncio
import ipaddress
import re
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from fastapi import FastAPI, Request, Response

from tableside.loader.errors import LoaderError
from tableside.loader.segment.blocks import BlockReader
from tableside.loader.segment.segment import Segment
from tableside.quant.contract import Bytes, Ids, Place, Planner, Table
from tableside.quant.cpu.native import packed_planner
from tableside.quant.cpu.packed import rows_with_ids
from tableside.quant.cpu.staged import fetched
from tableside.quant.errors import RowsNotRead
from tableside.quant.rows.fetched import RowReader
from tableside.serving.cluster.describe import describe
from tableside.serving.cluster.protocol import PATH, RowsLayout, TableIds, seal, unpack_request
from tableside.serving.errors import ApiError, ErrorKind, bad_request, not_found, short
from tableside.serving.http import asgi
from tableside.serving.http.v2.repository import has_token
from tableside.serving.metrics.disk import count_given
from tableside.serving.model.engine import Engine
from tableside.serving.service.service import Service

INLINE_BYTES = 4 << 20  # of a response up to which rows are copied on the event loop: some 5 ms
_CONTENT = re.compile("[0-9a-f]{16}")


class OwnedRows:
    """Answers requests for rows, from whichever version they name by its content."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._contents: WeakKeyDictionary[Segment, int] = WeakKeyDictionary()
        self._planners: WeakKeyDictionary[Segment, Planner] = WeakKeyDictionary()
        self._versions: dict[tuple[str, int], int] = {}  # content of versions that are not live
        self._looking = asyncio.Lock()

    def check(self, http: Request) -> None:
        """ApiError: the caller gets no rows."""
        token = self._service.cluster_token
        if token is not None:
            if not has_token(asgi.header(http.scope, b"authorization"), token):
                why = "rows are given to servers of this cluster alone: the request's Authorization is not "
                raise ApiError(401, ErrorKind.DENIED, f"{why}'Bearer ' and the cluster token")
        elif http.client is not None and not _is_loopback(http.client.host):
            why = "rows are given to other hosts by a server with a cluster token; start it with "
            raise ApiError(403, ErrorKind.DENIED, f"{why}--cluster-token-file FILE")

    def describe(self, model: str) -> dict[str, Any]:
        found = describe(self._service.live(model).segment)
        if found is None:
            raise not_found(f"model {short(model)} is whole; rows are given of a model's shares")
        return found.to_json()

    async def answer(self, model: str, content: str, body: bytes) -> asgi.Response:
        """Returns the rows that a request names. ApiError: it is none, the version is not here, or rows of a
        disk are late or damaged."""
        if not _CONTENT.fullmatch(content):
            what = f"rows of {short(model)}: the content is {short(content)}"
            raise bad_request(f"{what}; expected the 16 hexadecimal digits that GET {PATH}/MODEL says")
        number = int(content, 16)
        segment = await self._segment(self._service.engine(model), number)
        stored = segment.header.tables
        try:
            asked = unpack_request(body, len(stored))
        except ValueError as error:
            raise bad_request(f"rows of {short(model)}: {error}") from error
        layout = RowsLayout.of([(one.ids.size, stored[one.table].row_bytes) for one in asked])
        if layout.size > (limit := self._service.settings.max_response_bytes):
            what = f"the request asks for {layout.size:,} bytes of rows; the limit is {limit:,}"
            raise ApiError(413, ErrorKind.TOO_LARGE, f"{what} (max_response_bytes): ask in parts")
        arguments = segment, asked, layout, body, number
        if segment.readers or layout.size > INLINE_BYTES:
            rows = await self._service.beside(self._rows, *arguments)
        else:
            rows = self._rows(*arguments)
        count_given(model, sum(one.ids.size for one in asked))
        headers = ((b"content-type", b"application/octet-stream"),)
        return asgi.Response(200, headers, [rows.data])

    def _rows(
        self, segment: Segment, asked: list[TableIds], layout: RowsLayout, body: bytes, content: int
    ) -> Bytes:
        """Returns the body of a response."""
        stored = segment.header.tables
        out = np.empty(layout.size, np.uint8)
        out[layout.found_at[-1] + asked[-1].ids.size : layout.rows_at[0]] = 0
        in_memory, ids_at = [], len(body) - 8 * sum(one.ids.size for one in asked)
        for one, found_at, rows_at in zip(asked, layout.found_at, layout.rows_at, strict=True):
            n, name = one.ids.size, stored[one.table].name
            if name in segment.readers:
                found = out[found_at : found_at + n]
                rows = out[rows_at : rows_at + n * stored[one.table].row_bytes].reshape(n, -1)
                _read(segment.tables[name], segment.readers[name], one.ids, found, rows)
            else:
                in_memory.append(Place(one.table, ids_at, n, -1, 0, 0, -1, rows_at, 0, found_at))
            ids_at += 8 * n
        if in_memory:
            self._planner(segment).run(np.array(in_memory, np.int64).tobytes(), body, out)
        seal(out, content)
        return out

    def _planner(self, segment: Segment) -> Planner:
        if segment not in self._planners:
            tables = [segment.tables[t.name] for t in segment.header.tables]
            self._planners[segment] = packed_planner(tables)
        return self._planners[segment]

    async def _segment(self, engine: Engine, content: int) -> Segment:
        """Returns the version with this content."""
        live = engine.served().segment.base
        if self._content(live) == content:
            return live
        async with self._looking:
            number = await asyncio.get_running_loop().run_in_executor(None, self._look, engine, content)
        segment = None
        if number is not None:
            segment = (await self._service.version(engine.model.name, number)).segment.base
            if self._content(segment) != content:  # the folder was made anew, and numbers begin again
                self._versions.clear()
                segment = None
        if segment is None:
            raise not_found(
                f"no version of {engine.model.name!r} that is published here has content {content:016x}; "
                "load the model anew where it was asked from"
            )
        return segment

    def _look(self, engine: Engine, content: int) -> int | None:
        """Returns the number of the version with a content."""
        model = engine.model
        for version in reversed(model.versions()):
            known = model.name, version
            if known not in self._versions:
                try:
                    self._versions[known] = model.attach(version, "header").content()
                except (LoaderError, OSError):
                    continue
            if self._versions[known] == content:
                return version
        return None

    def _content(self, segment: Segment) -> int:
        if segment not in self._contents:
            self._contents[segment] = segment.content()
        return self._contents[segment]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(table: Table, reader: BlockReader, ids: Ids, found: Bytes, rows: Bytes) -> None:
    """Reads rows of a disk to found [n] and rows [n, row_bytes]. ApiError: they are late or damaged."""
    found[:], numbers = rows_with_ids(table, ids)
    try:
        came, at = fetched(table.fetched_by(RowReader(reader)), numbers, reader)
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

    @app.post(f"{PATH}/{{model}}/{{content}}", include_in_schema=False)
    async def rows(http: Request) -> Response:
        owned.check(http)
        named, hold = http.path_params, http.scope[asgi.HOLD]
        body = await asgi.read_body(http.scope, http.receive, service.settings.max_body_bytes, hold)
        return asgi.AsgiResponse(await owned.answer(named["model"], named["content"], body))
