"""Triton's CUDA shared memory extension. The engine process opens the regions and copies within the GPU.

    GET  /v2/cudasharedmemory[/region/{r}]/status
    POST /v2/cudasharedmemory/region/{r}/register    {"raw_handle": {"b64": ...}, "device_id", "byte_size"}
    POST /v2/cudasharedmemory[/region/{r}]/unregister

`raw_handle` is a cudaIpcMemHandle_t. Tensors name such a region like one of the host (`serving.http.v2.shm`).
(github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md)
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tableside.serving.errors import ApiError, bad_request, short
from tableside.serving.http.asgi import json_object
from tableside.serving.http.inputs.tensors import InputTensor, is_converted, split_name
from tableside.serving.http.v2 import shm
from tableside.serving.model.places import Output
from tableside.serving.model.request import Request
from tableside.serving.shm.regions import DeviceRegion, RegionEntry, Regions, Slice

if TYPE_CHECKING:
    from tableside.serving.engine_process.link import EngineLink

PATH = "cudasharedmemory"


def describe(entry: RegionEntry) -> dict[str, Any]:
    return {"name": entry.name, "device_id": entry.device, "byte_size": entry.byte_size}


async def register(regions: Regions, link: "EngineLink | None", name: str, body: bytes) -> None:
    """Like `shm.register`. link: to the engine process, which opens the region; None: no GPU."""
    if link is None:
        what = f"CUDA shared memory region {short(name)}: this server looks up on the CPU"
        raise bad_request(f"{what}; start it with --devices, or register system shared memory")
    asked = json_object(body)
    where = f"CUDA shared memory region {short(name)}"
    device, size = (shm.count(asked.get(n, 0), n, where) for n in ("device_id", "byte_size"))
    entry = regions.register_on_device(name, _handle(where, asked), device, size)
    try:
        await link.open_region(name)
    except ApiError:
        regions.forget(entry)
        raise


def _handle(where: str, asked: dict[str, Any]) -> bytes:
    given = asked.get("raw_handle")
    text = given.get("b64") if isinstance(given, dict) else None
    try:
        return base64.b64decode(text if isinstance(text, str) else "-", validate=True)
    except (binascii.Error, ValueError):
        raise bad_request(
            f'{where}: raw_handle is {short(given)}; expected {{"b64": ...}} with a cudaIpcMemHandle_t in '
            "base64"
        ) from None


def check_inputs(
    tensors: Sequence[InputTensor],
    slices: Sequence[Slice | None],
    dense: Mapping[str, int],
    together: bool,
    unpooled: Sequence[str],
) -> None:
    """ApiError: the server itself must read a tensor that lies on a GPU. unpooled: unpooled features."""
    for tensor, one in zip(tensors, slices, strict=True):
        if one is None or not isinstance(one.region, DeviceRegion):
            continue
        feature, part = split_name(tensor.name)
        is_read = (
            tensor.name in dense
            or is_converted(tensor)
            or (part == "lengths" and (together or feature in unpooled))
        )
        if is_read:
            raise bad_request(
                f"input {short(tensor.name)} lies in {one.region.entry.label}, and the server reads it "
                "itself (dense tensors, INT32 ids, BYTES, lengths of a kjt or of unpooled features); send it "
                "in the body, or in system shared memory"
            )


def is_asked_for(header: dict[str, Any], known: Regions | None) -> bool:
    """Returns whether an unchecked header asks for an output in a GPU's memory."""
    asked = header.get("outputs")
    if known is None or not isinstance(asked, list):
        return False
    parameters = [entry.get("parameters") for entry in asked if isinstance(entry, dict)]
    names = [p.get(shm.REGION) for p in parameters if isinstance(p, dict)]
    return any(isinstance(name, str) and known.is_on_device(name) for name in names)


def check_outputs(request: Request, outputs: Iterable[tuple[Output, Slice | None]], has_inputs: bool) -> None:
    """ApiError: an output made on the host is asked for on a GPU, or scores beside such tensors."""
    into = [output for output, one in outputs if one is not None and isinstance(one.region, DeviceRegion)]
    if request.scoring is not None and (into or has_inputs):
        raise bad_request(
            "scores are asked for, and tensors lie in CUDA shared memory; send and receive those in the body"
        )
    for output in into:
        if output.is_mask or output.is_offsets:
            raise bad_request(f"output {short(output.feature)} is made on the host; receive it in the body")
