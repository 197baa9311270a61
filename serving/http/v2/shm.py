"""Triton's system shared memory extension: registering regions, and tensors' region parameters.

    GET  /v2/systemsharedmemory[/region/{r}]/status
    POST /v2/systemsharedmemory/region/{r}/register      {"key": ..., "offset": ..., "byte_size": ...}
    POST /v2/systemsharedmemory[/region/{r}]/unregister

A tensor in a region has the parameters `shared_memory_region`, `shared_memory_byte_size` (an input's exact
size, an output's maximum) and `shared_memory_offset` (default 0).
(github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md)
"""

from typing import Any

from tableside.serving.errors import bad_request, short
from tableside.serving.http.asgi import json_object
from tableside.serving.shm.regions import DeviceRegion, Region, RegionEntry, Regions

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
PATH = "systemsharedmemory"
INLINE_BYTES = 4 << 20  # in regions up to which they are read and written on the event loop: some 0.4 ms


async def register(regions: Regions, link: object, name: str, body: bytes) -> None:
    """Registers a region from a request's body. link: not used. ApiError: it is refused."""
    asked = json_object(body)
    key = asked.get("key")
    if not isinstance(key, str):
        what = f"shared memory region {short(name)}: key is no string"
        raise bad_request(f"{what}; expected the name of a shared memory object")
    offset, size = (
        count(asked.get(n, 0), n, f"shared memory region {short(name)}") for n in ("offset", "byte_size")
    )
    regions.register(name, key, offset, size)


def describe(entry: RegionEntry) -> dict[str, Any]:
    return {"name": entry.name, "key": entry.key, "offset": entry.offset, "byte_size": entry.byte_size}


def part_of(
    parameters: dict[str, Any], where: str, regions: Regions | None
) -> tuple[Region | DeviceRegion, int, int] | None:
    """Returns a tensor's region, offset and size; None: it lies in none. where: the tensor in errors.
    ApiError: a wrong type, an unknown region, or out of its bounds."""
    if not any(p in parameters for p in (REGION, SIZE, OFFSET)):
        return None
    regions, name = allowed(regions, f"{where}: "), parameters.get(REGION)
    if not isinstance(name, str):
        raise bad_request(f"{where}: {REGION} is {short(name)}; expected the name of a registered region")
    size, offset = count(parameters.get(SIZE), SIZE, where), count(parameters.get(OFFSET, 0), OFFSET, where)
    region = regions.find(name)
    if not region.entry.holds(offset, size):
        what = f"{where}: offset {short(offset)} and {short(size)} bytes are outside {region.entry.label}"
        raise bad_request(f"{what}, which has {region.entry.byte_size:,} bytes")
    return region, offset, size


def count(value: Any, field: str, where: str) -> int:
    if type(value) is not int or value < 0:
        raise bad_request(f"{where}: {field} is {short(value)}; expected a number of bytes")
    return value


def input_bytes(header: dict[str, Any], regions: Regions | None) -> int:
    """Sums the bytes that an unchecked header claims in regions of the host."""
    inputs = header.get("inputs")
    found = 0
    for entry in inputs if isinstance(inputs, list) else ():
        parameters = entry.get("parameters") if isinstance(entry, dict) else None
        if not isinstance(parameters, dict):
            continue
        size, name = parameters.get(SIZE), parameters.get(REGION)
        is_copied = regions is None or not isinstance(name, str) or not regions.is_on_device(name)
        found += size if type(size) is int and size > 0 and is_copied else 0
    return found


def allowed(regions: Regions | None, where: str = "") -> Regions:
    """Returns the server's regions. where: the tensor in errors. ApiError: it has none."""
    if regions is None:
        raise bad_request(
            f"{where}shared memory regions are not supported by this server as it was started "
            "(allow_client_shm is off); send tensors in the body, or start it with --allow-client-shm"
        )
    return regions
