"""What a module reads, as a value: which model, where, on which device. As a string it is part of exported
programs."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tableside.quant.contract import INTERPRETER
from tableside.serving.modules.errors import ModuleError
from tableside.serving.settings import ServerSettings


@dataclass(frozen=True)
class ModuleSource:
    """A model's tables as one process reads them. Modules with equal sources share one attachment.

    root, owner: None: those of the settings where it is attached. version: None: the live one, whichever that
    is. device: "cpu", "cuda:N", or "interpreter" for the GPU's kernels on the CPU (tests). placement,
    hbm_budget, backend, verify: as for `tableside serve`. threads: of one lookup on the CPU; None: torch's
    number. ModuleError: a choice is unknown.
    """

    model: str
    root: str | None = None
    version: int | None = None
    device: str = "cpu"
    placement: str = "auto"
    hbm_budget: int | None = None
    threads: int | None = None
    backend: str = "native"
    verify: str = "full"
    owner: str | None = None

    def __post_init__(self) -> None:
        is_gpu = self.device.removeprefix("cuda:").isdecimal() and self.device.startswith("cuda:")
        if not (self.device in ("cpu", INTERPRETER) or is_gpu):
            raise ModuleError(
                f"device is {self.device!r}; expected 'cpu' or the GPU by its number, as 'cuda:0'"
            )
        if self.device == "cpu" and (self.placement != "auto" or self.hbm_budget is not None):
            raise ModuleError("placement and hbm_budget are for GPUs; leave them out, or say device='cuda:0'")
        if self.version is not None and (type(self.version) is not int or self.version < 1):
            raise ModuleError(f"version is {self.version!r}; expected a number from 1, or None")

    def to_string(self) -> str:
        """The source as `from_string` takes it: JSON of what is not the default."""
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None}, sort_keys=True)

    @staticmethod
    def from_string(text: str) -> "ModuleSource":
        """ModuleError: the text is no source."""
        return _parse(text)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def settings(self) -> ServerSettings:
        """The settings of `tableside serve` that place these tables alike. ModuleError: a setting is
        wrong."""
        found: dict[str, Any] = {} if self.root is None else {"root": Path(self.root)}
        if self.owner is not None:
            found["owner"] = self.owner
        try:
            return ServerSettings(
                models=(self.model,),
                devices=(self.device.removeprefix("cuda:"),) if self.on_gpu else (),
                workers=1,
                placement=self.placement,
                hbm_budget=self.hbm_budget,
                backend=self.backend,
                verify=self.verify,
                threads=1 if self.threads is None else self.threads,
                **found,
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the settings"
            raise ModuleError(
                f"{where}: {first['msg']} (model {self.model!r} as a PyTorch module)"
            ) from error


@cache
def _parse(text: str) -> ModuleSource:
    try:
        return ModuleSource(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ModuleError(
            f"{text!r} names no tables ({error}); it was made by another release; export the program again"
        ) from error
