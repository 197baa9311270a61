"""`tableside compile`: the kernels that a model needs on a GPU, compiled before it is served there."""

import argparse
import os
import re

from rich.table import Table

from tableside.loader.versions.versions import Model
from tableside.quant.device.architecture import architectures
from tableside.quant.gpu.ahead import CompiledKernel, has_driver
from tableside.quant.installed import require
from tableside.serving.cli.output import console, progress_bar
from tableside.serving.errors import ServingError
from tableside.serving.model.compiled_kernels import compile_once, kernels_wanted, triton_cache
from tableside.serving.settings import RootSettings, given


def compile_kernels(options: argparse.Namespace) -> int:
    """Compiles what is not in Triton's cache on disk: what servers launch, then what PyTorch modules do."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ServingError("TRITON_INTERPRET=1 has Triton interpret kernels and compile none; unset it")
    require("tableside compile", "torch", "triton", extra="gpu")
    arch = _arch(options.arch)
    settings = RootSettings(**given(options, RootSettings))
    segment = Model(settings.root, options.model, settings.owner).attach(options.version, "header")
    compiled: dict[str, CompiledKernel] = {}
    for what, tensors in (("servers", False), ("modules", True)):
        wanted = kernels_wanted(
            segment, options.placement, is_lfu=options.cache_policy == "lfu", tensors=tensors
        )
        with progress_bar(f"sm_{arch}, {what}") as progress:
            for one in compile_once(wanted, arch, options.jobs, progress) or ():
                compiled.setdefault(one.name, one)
    where = f"for sm_{arch} in {triton_cache()}"
    if not compiled:
        console.print(f"all kernels {where} were there before")
        return 0
    table = Table("kernel", "s", box=None)
    for one in sorted(compiled.values()):
        table.add_row(one.name, f"{one.seconds:.1f}")
    console.print(table)
    console.print(f"{len(compiled)} kernels {where}")
    if not has_driver():
        console.print(
            "CUDA's driver is not here: the code that launches kernels is compiled where they are launched "
            "first"
        )
    return 0


def _arch(given_as: str | None) -> int:
    """The number of an architecture, as 90 of sm_90; None: that of this machine's first GPU."""
    if given_as is not None:
        if (found := re.fullmatch(r"(?:sm_)?(\d{2,3})[a-z]?", given_as)) is None:
            raise ServingError(f"--arch is {given_as!r}; expected a GPU's architecture, such as sm_90")
        return int(found[1])
    if not (here := architectures()):
        raise ServingError(
            "there is no GPU here; name the architecture of the one that will serve, such as --arch sm_90"
        )
    return here[0]
