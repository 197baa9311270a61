"""Kernels compiled ahead, once per machine: one process compiles, the others wait.

Compiled kernels lie in Triton's cache on disk. Its folder `tableside` has a lock (`flock`, dropped with a
killed process) and an empty file per complete set, named by a digest of all it depends on: kernels, sources,
architecture, Triton, and whether launchers could be compiled too. A known set costs a look at one file.
Kernels that are not compiled ahead are compiled at launch. Imports neither torch nor Triton.
"""

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tableside import quant
from tableside.loader.files import take_lock
from tableside.loader.segment.segment import Segment
from tableside.quant import Pooling, QuantError
from tableside.quant.contract import INTERPRETER
from tableside.quant.device.architecture import architectures
from tableside.quant.gpu.ahead import CompiledKernel, compile_all, has_driver
from tableside.quant.gpu.kernels.wanted import KernelKey, WantedKernels
from tableside.quant.gpu.residence.registry import CHOICES, KINDS, is_by_cpu
from tableside.quant.installed import version_of
from tableside.quant.row_format import device_row_bytes
from tableside.serving.settings import ServerSettings

logger = logging.getLogger("tableside")

_WAIT_S = 300.0  # for another process that compiles
_TELLS = 4  # lines in the log about one set
Progress = Callable[[int, int], None]


def triton_cache() -> Path:
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton/cache"


def kernels_wanted(
    segment: Segment,
    placement: str,
    *,
    is_lfu: bool = True,
    gathers: tuple[bool, ...] = (False, True),
    tensors: bool = False,
) -> WantedKernels:
    """Returns the kernels that a version launches in a placement; auto: in any. is_lfu: the cache's policy.
    gathers: whether the CPU gathers misses; both if cores decide. tensors: also those of PyTorch modules."""
    features, tables = segment.header.features, segment.tables.values()
    poolings = {Pooling.parse(f.pooling) for f in features}
    kinds = [KINDS[name] for name in CHOICES[placement].kinds]
    is_cached = any(kind.is_cached for kind in kinds)
    return WantedKernels(
        KernelKey.of(*tables),
        pooled=poolings != {Pooling.NONE},
        unpooled=Pooling.NONE in poolings,
        has_maps=any(t.row_map is not None for t in tables),
        is_indirect=tuple(sorted({kind.is_indirect for kind in kinds})),
        cached_row_bytes=tuple(sorted({device_row_bytes(t.row_bytes) for t in tables})) if is_cached else (),
        gathers=gathers if is_cached else (),
        is_lfu=is_lfu,
        is_followed=segment.header.scorer is not None,
        tensor_features=len(features) if tensors else 0,
    )


def kernels_of_server(settings: ServerSettings, segment: Segment) -> WantedKernels:
    """Returns the kernels that an engine process with these settings launches for a version."""
    threads = settings.gather_threads
    return kernels_wanted(
        segment,
        settings.placement,
        is_lfu=settings.cache_policy == "lfu",
        gathers=(False, True) if threads is None else (threads > 0,),
    )


def are_compiled(settings: ServerSettings) -> bool:
    """Returns whether engine processes launch compiled kernels, not the interpreter's or the CPU's."""
    is_on_gpu = bool(settings.devices) and INTERPRETER not in settings.devices
    return is_on_gpu and not is_by_cpu(settings.placement)


def compile_once(
    wanted: WantedKernels, arch: int, jobs: int | None = None, progress: Progress | None = None
) -> list[CompiledKernel] | None:
    """Compiles a set, `jobs` at a time (None: one a core); None if it was there. Waits while another process
    compiles. QuantError: a kernel does not compile or the architecture is unknown. OSError: the cache is not
    writable."""
    done = triton_cache() / "tableside" / _digest(wanted, arch)
    if done.exists():
        return None
    done.parent.mkdir(parents=True, exist_ok=True)
    with _alone(done.parent / "lock", arch):
        if done.exists():
            return None
        compiled = compile_all(wanted, arch, jobs or len(os.sched_getaffinity(0)), progress)
        done.touch()
    return compiled


def compile_ahead(wanted: WantedKernels, arch: int) -> None:
    """Like `compile_once`, logged. On failure kernels compile at their first launch."""
    started = time.monotonic()
    told = 0

    def tell(done: int, of: int) -> None:
        nonlocal told
        if done * _TELLS // of > told:
            told = done * _TELLS // of
            logger.info("kernels for sm_%d: %d of %d are compiled", arch, done, of)

    try:
        compiled = compile_once(wanted, arch, progress=tell)
    except (QuantError, OSError) as error:
        logger.warning(
            "kernels are compiled when they are first launched, as they cannot be before: %s", error
        )
        return
    if compiled is not None:
        seconds = time.monotonic() - started
        logger.info("kernels for sm_%d: %d in %.1f s, in %s", arch, len(compiled), seconds, triton_cache())


def begin_to_compile(settings: ServerSettings, segments: Sequence[Segment]) -> threading.Thread | None:
    """Compiles engine processes' kernels on a thread while they start; None: nothing to do. It ends with this
    process."""
    if not are_compiled(settings):
        return None
    wanted = [kernels_of_server(settings, segment) for segment in segments]

    def run() -> None:
        for arch in sorted(set(architectures([int(device) for device in settings.devices]))):
            for one in wanted:
                compile_ahead(one, arch)

    thread = threading.Thread(target=run, name="tableside-kernels", daemon=True)
    thread.start()
    return thread


def _digest(wanted: WantedKernels, arch: int) -> str:
    room = Path(quant.__file__).parent
    parts = [
        repr(wanted),
        str(arch),
        str(version_of("triton")),
        sys.implementation.cache_tag,
        str(has_driver()),
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    for folder in ("gpu", "cache", "device"):
        for file in sorted((room / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@contextmanager
def _alone(lock: Path, arch: int) -> Iterator[None]:
    """Excludes other compiling processes; after _WAIT_S seconds it logs that and goes on."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not take_lock(fd):
            logger.info("another process compiles kernels; this one waits for them (sm_%d)", arch)
            if not take_lock(fd, _WAIT_S):
                logger.warning(
                    "%s is locked for more than %g s; kernels are compiled beside that process", lock, _WAIT_S
                )
        yield
    finally:
        os.close(fd)
