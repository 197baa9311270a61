"""Launches of one Triton kernel with fixed constants; Triton's own argument binding takes longer than a
launch."""

from contextlib import nullcontext
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


def constants(prefix: str, fields: type[IntEnum], first: int = 0) -> dict[str, tl.constexpr]:
    """Returns `PREFIX_NAME` for each field and `PREFIX_SIZE`, their number, as globals for Triton's kernels.
    first: number of the first field."""
    numbers = {field.name: first + int(field) for field in fields} | {"SIZE": len(fields)}
    return {f"{prefix}_{name}": tl.constexpr(number) for name, number in numbers.items()}


class Jobs(NamedTuple):
    """Where a kernel's jobs lie, and int32 [programs], the job of each program: byte offsets in what is sent
    to the device, or addresses there. ids: of all jobs, where the launch depends on it."""

    jobs_at: int
    programs_at: int
    programs: int
    ids: int = 0

    def placed(self, address: int) -> "Jobs":
        """Returns the addresses after a copy to `address`, which is 8-aligned."""
        return self._replace(jobs_at=address + self.jobs_at, programs_at=address + self.programs_at)


def kernel(function: Any) -> Any:
    """Makes a kernel of a function; Triton compiles it once for all values of its tl.int64 parameters."""
    numbers = [name for name, kind in function.__annotations__.items() if kind is tl.int64]
    return triton.jit(do_not_specialize=numbers)(function)


class Kernel:
    """A kernel for one device. Arguments are unspecialised int64 values; `constants` are its last parameters,
    in order."""

    def __init__(self, kernel: Any, warps: int, **constants: Any) -> None:
        self._kernel, self._warps, self._constants = kernel, warps, constants
        self._compiled: Any = None
        self._values = tuple(constants.values())
        assert [*constants] == [*kernel.arg_names][len(kernel.arg_names) - len(constants) :], (
            "constants come last, in order"
        )

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for equal kernels."""
        return self._kernel, self._warps, self._values

    def compile(self) -> Any:
        """Compiles into Triton's disk cache for the active driver's architecture; returns the unloaded
        compiled kernel."""
        arguments = [1] * (len(self._kernel.arg_names) - len(self._constants))
        return self._kernel.warmup(*arguments, **self._constants, num_warps=self._warps, grid=(1,))

    def __call__(self, programs: int, stream: int | None, *arguments: int) -> None:
        """Launches `programs` programs, if any, on the stream with this handle; None: in the interpreter."""
        if programs < 1:
            return
        if self._compiled is None:
            with _on(stream):
                self._compiled = self._kernel[(programs,)](
                    *arguments, **self._constants, num_warps=self._warps
                )
        else:
            # As Triton launches it, but without its hooks for profilers, which take longer than the launch.
            compiled = self._compiled
            no_hooks = (None, None, None)
            compiled.run(
                programs,
                1,
                1,
                stream,
                compiled.function,
                compiled.packed_metadata,
                *no_hooks,
                *arguments,
                *self._values,
            )


def _on(stream: int | None) -> Any:
    """Makes a stream the current one, which is where Triton itself launches."""
    if stream is None or torch.cuda.current_stream().cuda_stream == stream:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))  # type: ignore[no-untyped-call]
