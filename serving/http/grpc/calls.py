"""The calls of the protocol that are answered by what HTTP tells in JSON, by the protocol's names."""

import base64
from typing import Any

import orjson

from tableside.serving.errors import ApiError
from tableside.serving.http import metadata
from tableside.serving.http.v2 import cuda_shm, repository, shm
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.service import Service


class GrpcCalls:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def ServerLive(self, request: Any, context: Any) -> dict[str, Any]:
        return {"live": True}

    async def ServerReady(self, request: Any, context: Any) -> dict[str, Any]:
        return {"ready": self._service.ready}

    async def ServerMetadata(self, request: Any, context: Any) -> dict[str, Any]:
        return metadata.server_metadata(self._service)

    async def ModelReady(self, request: Any, context: Any) -> dict[str, Any]:
        try:
            await self._served(request)
        except ApiError as error:
            if error.status != 404:
                raise
            return {"ready": False}  # as Triton's server says of a model that it does not know
        return {"ready": self._service.ready}

    async def ModelMetadata(self, request: Any, context: Any) -> dict[str, Any]:
        return {**metadata.model_metadata(self._service, await self._served(request))}

    async def ModelConfig(self, request: Any, context: Any) -> dict[str, Any]:
        return {"config": metadata.model_configuration(await self._served(request))}

    async def ModelStatistics(self, request: Any, context: Any) -> dict[str, Any]:
        named = [await self._served(request)] if request.name else None
        served = named or [engine.attached() for engine in self._service.engines.values()]
        return {"model_stats": [s for one in served for s in metadata.model_statistics(one)]}

    async def _served(self, request: Any) -> ServedVersion:
        return await self._service.version(request.name, request.version or None)

    async def RepositoryIndex(self, request: Any, context: Any) -> dict[str, Any]:
        token = metadata_of(context, "authorization")
        return {"models": repository.index(self._service, {"ready": request.ready}, token)}

    async def RepositoryModelLoad(self, request: Any, context: Any) -> dict[str, Any]:
        return await self._change("load", request, context)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> dict[str, Any]:
        return await self._change("unload", request, context)

    async def _change(self, action: str, request: Any, context: Any) -> dict[str, Any]:
        token = metadata_of(context, "authorization")
        asked = {"parameters": dict.fromkeys(request.parameters)}
        await repository.change(self._service, action, request.model_name, asked, token)
        return {}

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> dict[str, Any]:
        return self._status(request, shm)

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> dict[str, Any]:
        asked = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
        return await self._register(request, shm, asked)

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> dict[str, Any]:
        return self._unregister(request, shm)

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> dict[str, Any]:
        return self._status(request, cuda_shm)

    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> dict[str, Any]:
        handle = {"b64": base64.b64encode(request.raw_handle).decode()}
        asked = {"raw_handle": handle, "device_id": request.device_id, "byte_size": request.byte_size}
        return await self._register(request, cuda_shm, asked)

    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> dict[str, Any]:
        return self._unregister(request, cuda_shm)

    def _status(self, request: Any, kind: Any) -> dict[str, Any]:
        regions = shm.allowed(self._service.regions)
        found = regions.status(request.name or None, on_device=kind is cuda_shm)
        return {"regions": {entry.name: kind.describe(entry) for entry in found}}

    async def _register(self, request: Any, kind: Any, asked: dict[str, Any]) -> dict[str, Any]:
        regions = shm.allowed(self._service.regions)
        await kind.register(regions, self._service.link, request.name, orjson.dumps(asked))
        return {}

    def _unregister(self, request: Any, kind: Any) -> dict[str, Any]:
        regions = shm.allowed(self._service.regions)
        regions.unregister(request.name or None, on_device=kind is cuda_shm)
        return {}


def metadata_of(context: Any, name: str) -> bytes | None:
    """The first value of a call's metadata by name; None: there is none."""
    return next((as_bytes(value) for key, value in context.invocation_metadata() if key == name), None)


def as_bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value
