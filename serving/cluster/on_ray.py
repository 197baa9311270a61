"""`tableside serve model.toml --engine ray`: Ray chooses the nodes of a model's owners.

Each host of a tier becomes an actor on a node of its own (a STRICT_SPREAD placement group). The actor loads
its share from the checkpoint, starts the ordinary server, and ends with it. Ray replaces an actor that ended,
on another node where its own is lost. This process serves the whole: it asks the actors for their addresses,
and publishes a version with them whenever one changed. Requests go from server to server, past Ray.
"""

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.load.load import load
from tableside.loader.load.plan import Sources
from tableside.loader.load.share import share_of
from tableside.loader.model.specs import ModelSpec
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.cluster.describe import remote_tables
from tableside.serving.errors import UNUSABLE, ServingError
from tableside.serving.settings import ServerSettings, cluster_token
from tableside.serving.with_ray import ray

logger = logging.getLogger("tableside")

_CONNECT_S = 10.0
_LOOK_S = 1.0  # between two questions for the addresses
_PATIENCE_S = 30.0  # after which the log says that an owner is waited for
# `python -m tableside`, which gets SIGTERM when its parent is gone
_PROGRAM = """import ctypes, runpy, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
runpy.run_module("tableside", run_name="__main__", alter_sys=True)
"""


class OwnerPlace(NamedTuple):
    """A host of a tier: the owner's number, and the host's name in model.toml."""

    number: int
    name: str


class _OwnerActor:
    """An actor. Its server ends with it, and it ends with its server."""

    def __init__(self, spec: ModelSpec, number: int, settings: ServerSettings, token: str) -> None:
        self._share, self._settings = share_of(spec, number), settings
        self._token, self._address = token_file(token), ""

    def address(self) -> tuple[str, str]:
        """Returns (HOST:PORT, "") of the server, which is started at first; or ("", what went wrong)."""
        try:
            self._address = self._address or self._start()
        except UNUSABLE as error:
            return "", f"owner {self._share.name}: {error}"
        return self._address, ""

    def _start(self) -> str:
        name, root = self._share.name, self._settings.root
        load(self._share, root)
        Model(root, name).collect(1)
        options: dict[str, Any] = {
            "--root": root,
            "--host": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "--port": 0,
            "--workers": self._settings.workers,
            "--cluster-token-file": self._token,
        }
        command = [sys.executable, "-c", _PROGRAM, "serve", name]
        command += [str(word) for option in options.items() for word in option]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None, "it is a pipe"
        _, found, url = server.stdout.readline().partition("http://")
        if not found:
            raise ServingError(f"tableside serve ended with {server.wait()}; Ray's log of the actor has why")
        threading.Thread(target=_end_with, args=(server,), daemon=True).start()
        return url.split()[0]


def _end_with(server: "subprocess.Popen[str]") -> None:
    server.wait()
    os._exit(1)  # Ray starts an actor anew that ended so


def token_file(token: str) -> Path:
    """Returns a file that has the token for as long as this process lives. It lies on no disk."""
    descriptor = os.memfd_create("tableside-token")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, token.encode())
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


class PlacedOwners:
    """The actors of a model's owners. Made by `owners_on_ray`."""

    def __init__(
        self, spec: ModelSpec, settings: ServerSettings, token: str, actors: Mapping[OwnerPlace, Any]
    ) -> None:
        self.token = token
        self._spec, self._settings, self._actors = spec, settings, actors
        self._published: dict[OwnerPlace, str] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tableside-ray", daemon=True)

    def begin(self) -> None:
        """Waits for all owners, publishes the whole model, and goes on looking. ServingError, LoaderError: an
        owner cannot be started, or the model not be loaded."""
        self._look()
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            try:
                self._look()
            except (*UNUSABLE, ray.exceptions.RayError) as error:
                logger.error("model %s: its owners' addresses are as before: %s", self._spec.name, error)

    def _look(self) -> None:
        """Publishes the model where an owner has another address."""
        asked = {place: actor.address.remote() for place, actor in self._actors.items()}
        found = dict(zip(asked, self._answers(asked), strict=True))
        if self._is_over.is_set() or found == self._published:
            return
        spec = with_addresses(self._spec, found)
        load(spec, self._settings.root, remote=remote_tables(spec, choose(), self.token))
        Model(self._settings.root, spec.name).collect(1)
        self._published = found

    def _answers(self, asked: Mapping[OwnerPlace, Any]) -> list[str]:
        """Returns the addresses; of an actor that is replaced meanwhile, those of its successor."""
        refs, left = list(asked.values()), _PATIENCE_S
        while not self._is_over.is_set():
            _, waiting = ray.wait(refs, num_returns=len(refs), timeout=_LOOK_S)
            if not waiting:
                break
            if (left := left - _LOOK_S) <= 0:
                names = ", ".join(str(place.number) for place, ref in asked.items() if ref in waiting)
                logger.warning("model %s waits for owner %s; has Ray a node for it?", self._spec.name, names)
                left = _PATIENCE_S
        else:
            return [""] * len(refs)
        answers = ray.get(refs)
        for _, error in answers:
            if error:
                raise ServingError(error)
        return [address for address, _ in answers]


@contextmanager
def owners_on_ray(spec: ModelSpec, settings: ServerSettings, address: str | None) -> Iterator[PlacedOwners]:
    """Places actors for a model's owners on the cluster at `address` (None: that of this node). They end with
    the block. ServingError: the model has no tier, or no cluster is reached."""
    places = _places_of(spec)
    token, on_sigterm = cluster_token(settings) or secrets.token_hex(), signal.getsignal(signal.SIGTERM)
    try:
        if address is not None and "://" not in address:  # Ray itself tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address or "auto", logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise ServingError(f"no Ray cluster is reached ({error}); start one, or set --ray-address") from error
    signal.signal(signal.SIGTERM, on_sigterm)  # which Ray takes
    try:
        bundle = {"CPU": settings.workers, "memory": _share_bytes(spec)}
        group = ray.util.placement_group([bundle] * len(places), strategy="STRICT_SPREAD")
        if not group.wait(_PATIENCE_S):
            nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
            what = f"model {spec.name} waits for {len(places)} nodes with {bundle} each"
            logger.warning("%s; Ray's cluster has %d", what, nodes)
        make = ray.remote(_OwnerActor).options
        actors = {}
        for number, place in enumerate(places):
            where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            )
            actor = make(
                num_cpus=settings.workers, max_restarts=-1, max_task_retries=-1, scheduling_strategy=where
            )
            actors[place] = actor.remote(spec, place.number, settings, token)
        owners = PlacedOwners(spec, settings, token, actors)
        try:
            yield owners
        finally:
            owners.end()
            ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()


def _places_of(spec: ModelSpec) -> list[OwnerPlace]:
    """Returns the places of a model's tiers. ServingError: there are none."""
    found = {
        OwnerPlace(number, name): None
        for t in spec.tables
        for number, replicas in enumerate(t.owners)
        for name in replicas
    }
    if not found:
        raise ServingError(
            f"no table of model {spec.name!r} has owners; expected a tier in model.toml, such as "
            '"rows://a:1,b:1", a name for each node that Ray is to choose'
        )
    return list(found)


def _share_bytes(spec: ModelSpec) -> int:
    """Returns the bytes of rows that an owner has, about."""
    tables = [t for t in spec.tables if t.owners]
    with open_checkpoint(spec.checkpoint) as checkpoint:
        sources = Sources(tables, checkpoint)
    return sum(sources.rows[t.name] * t.row_bytes(sources.dims[t.name]) // len(t.owners) for t in tables)


def with_addresses(spec: ModelSpec, found: Mapping[OwnerPlace, str]) -> ModelSpec:
    """Returns the model with these addresses in the places of its tiers."""

    def placed(owners: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(found[OwnerPlace(k, name)] for name in names) for k, names in enumerate(owners))

    return replace(spec, tables=tuple(replace(t, owners=placed(t.owners)) for t in spec.tables))
