"""Lookups of tensors on a GPU as PyTorch modules make them, of one feature of each table."""

from collections.abc import Sequence

import torch

from tableside.quant import LookupKind, Pooling, Precision
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.residence.tables import DeviceTable
from tableside.quant.gpu.tensors.calls import StagedLookup, TensorInput
from tableside.quant.gpu.tensors.tensors import TensorLookup


class DeviceLookup:
    """Looks up ids int64 [tables * ids], the ids of one table after those of another.

    bag_length: ids of a bag. 1: each id gets a vector; the call returns [tables * ids * dim]. Larger: bags
    are summed; the call returns [bags, tables * dim].
    """

    def __init__(
        self,
        backend: GpuBackend,
        tables: Sequence[DeviceTable],
        bag_length: int = 1,
        precision: Precision = Precision.FP16,
    ) -> None:
        pooling = Pooling.SUM if bag_length > 1 else Pooling.NONE
        self._features, self._bag_length = len(tables), bag_length
        self._reports = Reports(backend.launcher)
        self._offsets = torch.empty(0, dtype=torch.int64, device=backend.device.torch_device)
        kinds = [LookupKind(table, pooling, precision) for table in tables]
        self.lookup = TensorLookup(backend, [f"t{n}" for n in range(len(tables))], kinds, self._reports)

    def stage(self, ids: torch.Tensor) -> StagedLookup:
        """Sends what the device lacks of a call."""
        if self._bag_length == 1:
            parts = ids.view(self._features, -1).unbind()
            return self.lookup.stage_each([TensorInput(part, None, 0, 0, None) for part in parts])
        if self._offsets.numel() != ids.numel() // self._bag_length + 1:
            self._offsets = torch.arange(0, ids.numel() + 1, self._bag_length, device=ids.device)
        order = tuple(range(self._features))
        return self.lookup.stage_packed(ids, self._offsets, self._features, order, None)

    def prefetch(self, ids: torch.Tensor) -> StagedLookup:
        """Begins to bring the rows of a call to the cache; `run` looks them up."""
        return self.lookup.prefetch(self.stage(ids))

    def run(self, staged: StagedLookup) -> torch.Tensor:
        """Returns the vectors of a staged call."""
        return self.lookup(staged)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lookup(self.stage(ids))

    def check(self) -> None:
        """Asserts that each id of the calls so far was found."""
        assert self._reports.take() is None and not self.lookup.unfound.any()
