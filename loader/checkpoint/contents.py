"""What a version was made from: files of a checkpoint, without reading all of them."""

from collections.abc import Iterable
from pathlib import Path

import xxhash

from tableside.loader.checkpoint.rows import file_size

_SAMPLES, _SAMPLE_BYTES = 256, 4096  # see `sample`


def fingerprint(paths: Iterable[Path]) -> dict[str, list[int]]:
    """File -> [bytes, modification time in ns]: what a version was made from."""
    return {str(p): [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(paths)}


def sample(paths: Iterable[Path]) -> str:
    """Returns a digest of names, sizes and blocks spread over each file, which hosts see alike."""
    digest = xxhash.xxh3_64()
    for path in sorted(paths, key=lambda p: p.name):
        size = file_size(path)
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in sorted({size * n // _SAMPLES for n in range(_SAMPLES)}):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
