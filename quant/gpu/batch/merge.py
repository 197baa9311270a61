"""A batch's launches, and the header that tells kernels of them.
for each launch: jobs int64 [jobs, FIELDS] · job of each program int32 [programs] · zeros to 8
then the jobs of the resolve kernel (`quant.gpu.batch.resolve`) and the cache (`quant.cache.jobs`)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tableside.quant.cache.jobs import PROBE_BLOCK, ProbeJobs, shifted, write_jobs
from tableside.quant.device.device import Device
from tableside.quant.gpu.batch.layout import Bases, Layout, joined
from tableside.quant.gpu.batch.resolve import RESOLVE_BLOCK, ResolveJobs
from tableside.quant.gpu.batch.resolve import write_jobs as write_resolve_jobs
from tableside.quant.gpu.kernels.job import FIELDS
from tableside.quant.gpu.kernels.launch_config import LaunchConfig
from tableside.quant.gpu.kernels.wanted import KernelKey


@dataclass(frozen=True)
class Launch:
    """Jobs of one launch. jobs_at, programs_at: header offsets of jobs and of programs' jobs. members:
    (request, its first flag, end of its flags)."""

    pooled: bool
    key: KernelKey
    config: LaunchConfig
    jobs: int
    programs: int
    first_flag: int
    has_lengths: bool
    is_weighted: bool
    is_indirect: bool
    jobs_at: int
    programs_at: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Launches:
    """Launches of a batch, in order: `resolve` and `probe`, if any, then the lookups. address: of the header
    on the device."""

    lookups: tuple[Launch, ...]
    resolve: ResolveJobs | None
    probe: ProbeJobs | None
    address: int = 0

    def placed(self, address: int) -> "Launches":
        """The same, with the header at this address of the device, a multiple of 8."""
        resolve = None if self.resolve is None else self.resolve.placed(address)
        return Launches(
            self.lookups, resolve, None if self.probe is None else self.probe.placed(address), address
        )


def merge(layouts: Sequence[Layout], bases: Sequence[Bases], device: Device) -> tuple[bytes, Launches]:
    """Returns a batch's header and its launches. bases: of each request. Requests with equal kernels and
    launch configurations share a launch."""
    written: list[bytes] = []
    launches: list[Launch] = []
    at = flag = 0
    for (kind, key, config), numbers in _alike(layouts):
        of_kind = [layouts[n].jobs[kind] for n in numbers]
        rows, of_program = joined(of_kind, [bases[n] for n in numbers])
        programs, jobs, members = len(of_program) // 4, 0, []
        for n, own in zip(numbers, of_kind, strict=True):
            members.append((n, flag + jobs, flag + jobs + len(own.rows)))
            jobs += len(own.rows)
        launches.append(
            Launch(
                pooled=of_kind[0].pooled,
                key=key,
                config=config,
                jobs=jobs,
                programs=programs,
                first_flag=flag,
                has_lengths=any(own.has_lengths for own in of_kind),
                is_weighted=any(own.is_weighted for own in of_kind),
                is_indirect=any(own.is_indirect for own in of_kind),
                jobs_at=at,
                programs_at=at + 8 * FIELDS * jobs,
                members=tuple(members),
            )
        )
        part = b"".join([rows, of_program, bytes(-4 * programs % 8)])
        written.append(part)
        at += len(part)
        flag += jobs
    resolve = probe = None
    if resolved := [
        r.shifted(b.inputs, b.outputs)
        for layout, b in zip(layouts, bases, strict=True)
        for r in layout.resolved
    ]:
        part, resolve = write_resolve_jobs(resolved, device.block(RESOLVE_BLOCK))
        written.append(part)
        resolve = resolve.placed(at)
        at += len(part)
    if counts := [len(layout.cached) for layout in layouts if len(layout.cached)]:
        bases_of = [(b.inputs, b.locations) for la, b in zip(layouts, bases, strict=True) if len(la.cached)]
        of_lookup = np.repeat(bases_of, counts, axis=0)
        cached = shifted(np.concatenate([la.cached for la in layouts]), of_lookup[:, 0], of_lookup[:, 1])
        part, probe = write_jobs(cached, device.block(PROBE_BLOCK))
        written.append(part)
        probe = probe.placed(at)
    return b"".join(written), Launches(tuple(launches), resolve, probe)


def _alike(layouts: Sequence[Layout]) -> list[tuple[tuple[int, KernelKey, LaunchConfig], list[int]]]:
    """Groups layouts, by number, with equal kernels and launch configurations for a kind of jobs."""
    found: list[tuple[tuple[int, KernelKey, LaunchConfig], list[int]]] = []
    known: dict[tuple[int, int, int], list[int]] = {}  # by identity, as hashing takes longer than the rest
    for kind in range(2):
        for n, layout in enumerate(layouts):
            own = layout.jobs[kind]
            if not own.rows.size:
                continue
            identity = (kind, id(layout.key), id(own.config))
            if (numbers := known.get(identity)) is None:
                alike = (kind, layout.key, own.config)
                numbers = next((of for other, of in found if other == alike), None)
                if numbers is None:
                    found.append((alike, numbers := []))
                known[identity] = numbers
            numbers.append(n)
    return found


def jobs_on_device(layout: Layout, device: Device) -> tuple[torch.Tensor, Launches]:
    """The header of one request on the device, and what is to be launched."""
    header, launches = merge([layout], [Bases()], device)
    memory = torch.empty(max(1, len(header)), dtype=torch.uint8, device=device.torch_device)
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header or b"0"), dtype=torch.uint8)[: len(header)])
    return memory, launches.placed(memory.data_ptr())
