"""Plans of the GPU's backend: lookups of one request, laid out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tableside.quant.contract import Plan, Planner, Unfound, Waiting
from tableside.quant.errors import BadIds, Refused
from tableside.quant.gpu.batch.layout import Layout, Layouts
from tableside.quant.gpu.batch.placed import Launches, launches_on_device

if TYPE_CHECKING:
    from tableside.quant.gpu.batch.batches import Batches


class GpuPlan(Plan):
    """Lookups of one request, laid out for batches of a device."""

    def __init__(self, batches: "Batches", layout: Layout) -> None:
        self.batches, self.layout = batches, layout
        self.staged_bytes, self.is_on_device = layout.staged_bytes, layout.host is None
        host = layout.host
        self.waits = host is not None and host.waits
        self.begins_at_once = host is not None and host.begins_at_once
        self._runs = 0
        self._on_device: tuple[torch.Tensor, Launches] | None = None

    def begin(self, inputs: Any) -> Plan | Waiting:
        """As the contract says; of the CPU's lookups."""
        if self.layout.host is None:
            return self
        with self.naming(inputs):
            host = self.layout.host.begin(inputs)
        return _WaitingHost(self, host, inputs) if isinstance(host, Waiting) else self.with_host(host)

    @contextmanager
    def naming(self, inputs: Any) -> Iterator[None]:
        """An error of the CPU's lookups becomes that of the request's first lookup that is wrong."""
        try:
            yield
        except BadIds as error:
            raise (self.layout.problem(inputs, error) or error) from None

    def with_host(self, host: Plan) -> "GpuPlan":
        """The same with another plan of the CPU's lookups."""
        return GpuPlan(self.batches, self.layout.with_host(host))

    def launches_alone(self) -> Launches | None:
        """Returns the launches if this plan alone is a batch and its header is on the device (from the second
        run on); otherwise None. Plans with gathered rows never are: their buffer may grow and move."""
        self._runs += 1
        if self.layout.gathers or self._runs < 2:
            return None
        if self._on_device is None:
            self._on_device = launches_on_device(self.layout, self.batches.launcher.device)
        return self._on_device[1]

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """As the contract says, as a batch of one request."""
        ((result,), _) = self.batches.run([(self, inputs)])
        if isinstance(result, Refused):
            raise result
        target = np.frombuffer(outputs, np.uint8)
        for lk in self.layout.lookups():
            target[lk.out_at : lk.out_at + lk.out_bytes] = result.outputs[
                lk.out_at : lk.out_at + lk.out_bytes
            ]
            if lk.found_at is not None:
                target[lk.found_at : lk.found_at + lk.ids] = result.outputs[
                    lk.found_at : lk.found_at + lk.ids
                ]
        return result.unfound


class _WaitingHost(Waiting):
    """A plan whose lookups by the CPU wait."""

    def __init__(self, plan: GpuPlan, host: Waiting, inputs: Any) -> None:
        self._plan, self._host, self._inputs = plan, host, inputs

    def wait(self, deadline: float | None = None) -> Plan:
        with self._plan.naming(self._inputs):
            return self._plan.with_host(self._host.wait(deadline))


class GpuPlanner(Planner):
    """Plans lookups for batches of a device."""

    def __init__(self, batches: "Batches", layouts: Layouts) -> None:
        self._batches, self._layouts = batches, layouts

    def plan(self, places: Any, out_bytes: int = 0) -> GpuPlan:
        return GpuPlan(self._batches, self._layouts.lay_out(places, out_bytes))
