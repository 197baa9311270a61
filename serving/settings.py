"""The server's settings. Defaults and TABLESIDE_NAME are read here alone; `add_options` makes `--drain-s` of
`drain_s`."""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from tableside.loader.model.nearest import did_you_mean
from tableside.loader.model.tiers import PASSWORD, USERNAME
from tableside.loader.versions.versions import DEFAULT_ROOT
from tableside.quant.contract import INTERPRETER, Precision
from tableside.quant.gpu.residence.registry import ALIASES, CHOICES, KINDS, is_by_cpu
from tableside.serving.errors import ServingError
from tableside.serving.sizes import Bytes

PREFIX = "TABLESIDE_"
TOKEN_LENGTH = 16  # of an admin token, at least
# of images, of the client, and of loader.redis
_OTHERS = {"TABLESIDE_IMAGE", "TABLESIDE_URL", USERNAME, PASSWORD}
_SERVICE_LINK = re.compile(
    r".*_(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_.*)?)?)"
)
_GROUPS = {  # of a command's help, by the first field of each; those before go without a title
    "uds": "addresses",
    "backend": "lookups and versions",
    "gather_threads": "GPUs",
    "scorer_dtype": "scorers",
    "max_body_bytes": "limits of requests",
    "max_header_bytes": "limits of connections",
    "allow_client_shm": "clients and operators",
    "log_format": "logs and traces",
    "ready_timeout_s": "start and end",
}


if TYPE_CHECKING:
    PlacementName = str
else:
    PlacementName = Literal[tuple(CHOICES)]


class RootSettings(BaseSettings):
    """The settings of every command."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True)

    root: Path = Field(DEFAULT_ROOT, description="folder in shared memory that holds the published models")
    owner: str | None = Field(None, description="user whose models are trusted, beside one's own and root's")


_ClusterToken = Annotated[
    Path | None,
    Field(
        description="file with the token that servers share which have rows of one model; without it rows "
        "are given to this host alone",
    ),
]


class ClusterSettings(RootSettings):
    """Those of commands that ask other hosts for rows."""

    cluster_token_file: _ClusterToken = None


class ServerSettings(RootSettings):
    """The settings of `tableside serve`."""

    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="published models to serve, separated by commas"
    )
    all: bool = Field(False, description="serve every model of the root, also those published later")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    workers: int = Field(1, ge=1, le=256, description="worker processes")
    devices: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="numbers of the workers' GPUs, separated by commas; none: lookups run on the CPU"
    )
    placement: PlacementName = Field(
        "auto",
        description="where rows lie with --devices: "
        + "".join(f"{name}: {kind.says}; " for name, kind in KINDS.items() if name in CHOICES)
        + "auto: hbm within the budget, smallest tables first, the others cached; uvm: old for zero_copy",
    )
    hbm_budget: Bytes | None = Field(
        None,
        description="GPU memory for tables and cache of one engine process, as 8GiB; not set: two fifths",
    )

    uds: Path | None = Field(
        None, description="path of a Unix socket instead of host and port, for the server's user and group"
    )
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port for the Open Inference Protocol over gRPC; 0 picks a free one; not set: none",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="allowed names in a request's Host, separated by commas, beside IP addresses; *: all; not"
        " set: localhost on a loopback address, else all",
    )

    backend: Literal["native", "fbgemm"] = Field("native", description="what looks rows up")
    threads: int = Field(
        1, ge=1, le=64, description="threads of one lookup; more than 1 only pays with idle cores"
    )
    verify: Literal["full", "always", "header"] = Field(
        "full",
        description="on attaching a version, check every byte, in the first process of this host (full) or "
        "in each (always), or only its header: then damaged rows are served until the scrubber or "
        "`tableside verify` finds them",
    )
    disk_timeout_s: float = Field(
        2.0, gt=0, le=60, description="seconds that a request waits for rows of a root on a disk"
    )
    disk_late: Literal["default", "error"] = Field(
        "default",
        description="what a row of a root on a disk becomes that comes later: the default row of its table, "
        "as the answer says, or a 503 (error); a 503 where a table has none, or lies under a GPU's cache",
    )
    host_cache: Bytes = Field(
        0,
        ge=0,
        description="memory for the rows used most of each model on a disk or in Redis, as 8GiB; 0: none",
    )
    host_cache_s: float = Field(
        30.0,
        gt=0,
        description="seconds between looks at which rows of a model on a disk, or in Redis, are used most",
    )
    poll_s: float = Field(0.1, gt=0, le=10, description="seconds between looks at which version is live")
    max_behind_s: float = Field(
        0, ge=0, description="seconds that a ready worker may answer from an older state; 0: any"
    )
    scrub_hours: float = Field(
        24, ge=0, description="hours between checks of all rows against their checksums; 0: never"
    )

    gather_threads: int | None = Field(
        None,
        ge=0,
        le=64,
        description="CPU threads that gather rows missed by a GPU's cache; 0: the GPU reads them; not set: 1 "
        "to 8 of the cores left by workers if the tables span 4 GiB or more",
    )
    cache_policy: Literal["lfu", "lru"] = Field(
        "lfu", description="which rows a GPU's cache evicts: least frequently or least recently used"
    )
    max_batch: int = Field(64, ge=1, le=1024, description="requests that go to a GPU together")
    gpu_from_ids: int = Field(
        4096, ge=0, description="ids of a request from which a GPU looks it up, not the CPU; scores apart"
    )

    scorer_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="type in which an exported scorer computes on a GPU; bf16 and fp16 round weights and "
        "inputs, scores stay fp32, and a program that mixes types is refused",
    )
    scorer_timeout_s: float = Field(
        10, gt=0, description="seconds of one scorer call, after which the worker is replaced"
    )
    max_scorer_bytes: Bytes = Field(
        2 << 30, ge=1 << 20, description="memory of one call of an exported scorer, as 512MiB"
    )

    max_body_bytes: Bytes = Field(64 << 20, ge=1024, description="largest request body, as 64MiB")
    max_response_bytes: Bytes = Field(
        256 << 20, ge=1024, description="largest response that a request may ask for"
    )
    max_json_bytes: Bytes = Field(
        4 << 20, ge=1024, description="largest JSON body, JSON header, and vectors in JSON"
    )
    max_in_flight_bytes: Bytes = Field(
        1 << 30, ge=1 << 20, description="bytes of bodies and responses in a worker; beyond, 503"
    )
    max_waiting: int = Field(
        1024, ge=1, description="requests that wait for their turn; beyond, the oldest gets 503"
    )
    max_wait_s: float = Field(
        1.0, gt=0, description="seconds that a request waits for its turn before it gets 503"
    )

    max_header_bytes: Bytes = Field(16 << 10, ge=256, description="largest request line and headers together")
    max_connections: int = Field(
        1024, ge=1, description="connections of a worker; beyond, the longest idle one is closed, or 503"
    )
    header_timeout_s: float = Field(
        8, gt=0, description="seconds from connecting to the first byte, and on to the end of the headers"
    )
    body_timeout_s: float = Field(
        8, gt=0, description="seconds from the end of the headers to that of the body"
    )
    write_timeout_s: float = Field(8, gt=0, description="seconds that a client may refuse to read")
    idle_timeout_s: int = Field(75, ge=1, description="seconds between two requests of a connection")

    allow_client_shm: bool = Field(
        False, description="let clients of this host register the server user's shared memory"
    )
    admin_token: SecretStr | None = Field(
        None,
        min_length=TOKEN_LENGTH,
        description="token for loading and unloading models; a file hides it from ps",
    )
    admin_token_file: Path | None = Field(
        None, description="file with the admin token; white space around it is ignored"
    )
    cluster_token_file: _ClusterToken = None

    log_format: Literal["text", "json"] = Field("text", description="log lines as text or as JSON objects")
    traces: str = Field(
        "",
        description="OpenTelemetry exporter of request spans, as otlp_proto_http or console; needs "
        "tableside[otel] and OTEL_* variables; empty: none",
    )

    ready_timeout_s: int = Field(
        600, ge=1, description="seconds to attach and verify before SIGHUP gives a successor up"
    )
    drain_s: float = Field(
        0.5, ge=0, description="seconds from readiness going false to the last accepted connection"
    )
    shutdown_timeout_s: int = Field(10, ge=1, description="seconds that running requests get at shutdown")

    engines: int = Field(
        1, ge=1, exclude=True, description="engine processes of this host's GPUs; the supervisor's to set"
    )
    engine: str = Field(
        "", exclude=True, description="address of this worker's engine process; the supervisor's to set"
    )
    sharing: int = Field(
        1,
        ge=1,
        exclude=True,
        description="processes of an evaluation on this one's device; the pool's to set",
    )

    @property
    def scorer_precision(self) -> Precision:
        """`scorer_dtype` as kernels and programs know it."""
        return Precision[self.scorer_dtype.upper()]

    @model_validator(mode="after")
    def _gpu_settings(self) -> "ServerSettings":
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(
                f"devices {','.join(self.devices)} name one twice; workers are spread over them, so name "
                "each once"
            )
        is_on_gpu = self.placement != "auto" and not is_by_cpu(self.placement)
        if not self.devices and (is_on_gpu or self.hbm_budget is not None):
            raise ValueError(
                "placement and hbm_budget are for GPUs; say which ones with --devices, or leave them out"
            )
        if not self.devices and self.scorer_dtype != "fp32":
            raise ValueError(
                f"scorer_dtype {self.scorer_dtype} is for GPUs, and the CPU scores in fp32; say which ones "
                "with --devices, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_admin_token(self) -> "ServerSettings":
        if self.admin_token is not None and self.admin_token_file is not None:
            raise ValueError("admin_token and admin_token_file are both set; expected one of them")
        return self

    @model_validator(mode="after")
    def _one_request_fits(self) -> "ServerSettings":
        if self.max_in_flight_bytes < self.max_body_bytes + self.max_response_bytes:
            raise ValueError(
                f"max_in_flight_bytes is {self.max_in_flight_bytes:,}; the largest request and its response "
                "alone may take "
                f"{self.max_body_bytes + self.max_response_bytes:,} (max_body_bytes + max_response_bytes)"
            )
        return self

    @field_validator("placement", mode="before")
    @classmethod
    def _placement_names(cls, value: Any) -> Any:
        return ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("devices", mode="after")
    @classmethod
    def _device_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not (name.isdecimal() or name == INTERPRETER):
                raise ValueError(f"device {name!r} is not the number of a GPU; expected for instance 0,1")
        return value

    @field_validator("models", "devices", "allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(name for name in value.split(",") if name) if isinstance(value, str) else value


def admin_token(settings: ServerSettings) -> str | None:
    """Returns the admin token or None. ServingError: its file is unreadable, empty, or readable by others."""
    if settings.admin_token is not None:
        return settings.admin_token.get_secret_value()
    return _token_in(settings.admin_token_file, "admin token")


def cluster_token(settings: ClusterSettings | ServerSettings) -> str | None:
    """Returns the token of servers that share rows, or None. ServingError: as `admin_token`."""
    return _token_in(settings.cluster_token_file, "cluster token")


def _token_in(file: Path | None, what: str) -> str | None:
    if file is None:
        return None
    try:
        mode = file.stat().st_mode & 0o777
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"the {what}'s file {file} cannot be read: {error}") from error
    if mode & 0o007:
        raise ServingError(
            f"the {what}'s file {file} has mode {mode:04o}, so every user may use it; chmod o-rwx {file}"
        )
    if len(token) < TOKEN_LENGTH or not token.isascii() or not token.isprintable():
        raise ServingError(
            f"{file} holds no {what}; expected one line of {TOKEN_LENGTH} or more ASCII characters"
        )
    return token


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """Yields a line for each variable that begins like a setting and is none, with a remedy."""
    known = {
        f"{PREFIX}{name.upper()}" for name, field in ServerSettings.model_fields.items() if not field.exclude
    }
    for name in sorted(names):
        if not name.upper().startswith(PREFIX) or name.upper() in known | _OTHERS:
            continue
        if _SERVICE_LINK.fullmatch(name):
            remedy = "; Kubernetes sets it for a Service that is called so: "
            remedy += "set enableServiceLinks: false for the pod"
        else:
            remedy = (
                did_you_mean(name.upper(), sorted(known), PREFIX)
                or "; unset it (tableside serve --help names all settings)"
            )
        yield f"the environment has {name}, which is no setting{remedy}"


def add_options(
    parser: argparse.ArgumentParser,
    settings: type[BaseSettings],
    *,
    skip: tuple[str, ...] = (),
    title: str = "",
) -> None:
    """Adds an option for each field, in groups, without a default, so that the environment counts. title: of
    the first group; "": the parser's own options."""
    groups = dict[str, argparse._ActionsContainer]({"": parser})
    for name, field in settings.model_fields.items():
        title = _GROUPS.get(name, title)
        if name in skip:
            continue
        options: dict[str, Any] = {
            "default": None,
            "help": f"{field.description} (default: {field.default}; {PREFIX}{name.upper()})",
        }
        if field.annotation is bool:
            options["action"] = "store_true"
        elif get_origin(field.annotation) is Literal:
            options["choices"] = get_args(field.annotation)
            options["type"] = lambda value: ALIASES.get(value, value)
        else:
            options["metavar"] = name.rsplit("_", 1)[-1].upper()
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        group.add_argument(f"--{name.replace('_', '-')}", **options)


def given(arguments: argparse.Namespace, settings: type[BaseSettings]) -> dict[str, Any]:
    """The fields that were set on the command line."""
    values = {name: getattr(arguments, name, None) for name in settings.model_fields}
    return {name: value for name, value in values.items() if value is not None}
