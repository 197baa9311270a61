"""`tableside compile`: the kernels that a model needs on a GPU, compiled before it is served there."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from tableside.loader.segment import Segment
from tableside.loader.versions import Model
from tableside.quant import MissingBackend, Pooling
from tableside.serving.cli.output import console, progress_bar
from tableside.serving.errors import ServingError
from tableside.serving.placement import Placement
from tableside.serving.settings import RootSettings, given

if TYPE_CHECKING:
    from tableside.quant.gpu.ahead import WantedKernels

_FIND_ARCH = "import torch; torch.cuda.is_available() and print(*torch.cuda.get_device_capability(), sep='')"
_DIRECT = (Placement.HBM, Placement.ZERO_COPY)


def compile_kernels(options: argparse.Namespace) -> int:
    """Compiles what is not in Triton's cache on disk; prints what there is then."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ServingError("TRITON_INTERPRET=1 has Triton interpret kernels and compile none; unset it")
    try:
        from tableside.quant.gpu.ahead import compile_all
    except MissingBackend as error:
        raise ServingError(str(error)) from error
    arch = _arch(options.arch)
    settings = RootSettings(**given(options, RootSettings))
    segment = Model(settings.root, options.model, settings.owner).attach(options.version, "header")
    with progress_bar(f"sm_{arch}") as progress:
        jobs = options.jobs or len(os.sched_getaffinity(0))
        compiled = compile_all(_wanted(segment, options.placement), arch, jobs, progress)
    table = Table("kernel", "s", box=None)
    for one in sorted(compiled):
        table.add_row(one.name, f"{one.seconds:.1f}")
    console.print(table)
    console.print(
        f"{len(compiled)} kernels for sm_{arch} in {os.environ.get('TRITON_CACHE_DIR') or Path.home() / '.triton/cache'}"
    )
    return 0


def _wanted(segment: Segment, placement: str) -> "WantedKernels":
    """What a model's tables launch where they are placed so; auto: wherever they may come to lie."""
    from tableside.quant.gpu.ahead import WantedKernels
    from tableside.quant.gpu.tables import KernelKey

    where = None if placement == "auto" else Placement(placement)
    poolings = {Pooling.parse(f.pooling) for f in segment.header.features}
    is_cached = where in (None, Placement.CACHED)
    return WantedKernels(
        KernelKey.of(*segment.tables.values()),
        pooled=poolings != {Pooling.NONE},
        unpooled=Pooling.NONE in poolings,
        has_maps=any(t.row_map is not None for t in segment.tables.values()),
        is_indirect=(False, True) if where is None else (where not in _DIRECT,),
        cached_row_bytes=max(t.row_bytes for t in segment.tables.values()) if is_cached else 0,
        gathers=(False, True),  # which of them, the host's cores say
        is_followed=segment.header.scorer is not None,
    )


def _arch(given_as: str | None) -> int:
    """The number of an architecture, as 90 of sm_90; None: that of this machine's first GPU, which another process asks for."""
    if given_as is not None:
        if (found := re.fullmatch(r"(?:sm_)?(\d{2,3})[a-z]?", given_as)) is None:
            raise ServingError(f"--arch is {given_as!r}; expected a GPU's architecture, such as sm_90")
        return int(found[1])
    asked = subprocess.run([sys.executable, "-c", _FIND_ARCH], capture_output=True, text=True, check=False)
    if not asked.stdout.strip().isdigit():
        raise ServingError("there is no GPU here; name the architecture of the one that will serve, such as --arch sm_90")
    return int(asked.stdout)
