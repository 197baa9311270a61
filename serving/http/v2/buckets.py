"""Files of an owner's states, for the owners of another number of them (serving.cluster.protocol)."""

from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response

from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredRows
from tableside.loader.segment.transfer import head_of, stored_range
from tableside.quant.contract import Bytes
from tableside.serving.cluster.protocol import FILES_PATH
from tableside.serving.errors import ApiError, ErrorKind, bad_request, not_found, short
from tableside.serving.http import asgi
from tableside.serving.http.v2.rows import OwnedRows
from tableside.serving.service.service import Service


def add_to(app: FastAPI, service: Service, owned: OwnedRows) -> None:
    @app.get(f"{FILES_PATH}/{{model}}/{{state}}", include_in_schema=False)
    async def heads(http: Request) -> Response:
        owned.check_caller(http)
        segment = await owned.segment(http.path_params["model"], http.path_params["state"])
        found = [head_of(file) for file in _files(segment)]
        sizes = np.array([len(found), *(head.size for head in found)], "<i8")
        return _answer(sizes.view(np.uint8), *found)

    @app.get(f"{FILES_PATH}/{{model}}/{{state}}/{{identity}}/{{chunks}}", include_in_schema=False)
    async def chunks(http: Request) -> Response:
        owned.check_caller(http)
        named = http.path_params
        segment = await owned.segment(named["model"], named["state"])
        file, stored, start, stop = _asked(segment, named["identity"], named["chunks"])
        size, limit = (stop - start) * stored.row_bytes, service.settings.max_response_bytes
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
