"""Launches of one Triton kernel with fixed constants. Triton's own binding of arguments takes longer than
a launch."""

from contextlib import nullcontext
from enum import IntEnum
from typing import Any

import torch
import triton.language as tl


def constants(prefix: str, fields: type[IntEnum], first: int = 0) -> dict[str, tl.constexpr]:
    """`PREFIX_NAME` for each field, and `PREFIX_SIZE`, how many there are. Triton's kernels read such globals
    alone.

    A kernel's module puts them into its globals, so that kernels and host name fields alike. first: where the
    record begins, if another one is before it.
    """
    numbers = {field.name: first + int(field) for field in fields} | {"SIZE": len(fields)}
    return {f"{prefix}_{name}": tl.constexpr(number) for name, number in numbers.items()}


class Kernel:
    """A kernel for one device. All arguments but the constants are int64 addresses and numbers, for which it
    is not specialised.

    constants: by name. They are the last of the kernel's parameters, in the same order.
    """

    def __init__(self, kernel: Any, warps: int, **constants: Any) -> None:
        self._kernel, self._warps, self._constants = kernel, warps, constants
        self._compiled: Any = None
        self._values = tuple(constants.values())
        assert [*constants] == [*kernel.arg_names][len(kernel.arg_names) - len(constants) :], (
            "constants come last, in order"
        )

    @property
    def identity(self) -> tuple[Any, ...]:
        """What it is compiled of: the same for kernels that are the same."""
        return self._kernel, self._warps, self._values

    def compile(self) -> Any:
        """Compiles for the architecture of Triton's active driver, as a first launch would, into Triton's
        cache on disk.

        Returns Triton's compiled kernel, which is not loaded.
        """
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
