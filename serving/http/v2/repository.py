"""The model repository extension: list, load and unload models at run time.

    POST /v2/repository/index                       {"ready": true} leaves out what is not served
    POST /v2/repository/models/{m}/load|unload      needs `Authorization: Bearer TOKEN`

Loading attaches a model's live published version in every worker. Triton's parameters with a configuration
or files are refused.
(github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md)
"""

import hmac
from typing import Any

from tableside.loader.errors import LoaderError
from tableside.loader.versions.versions import models
from tableside.serving.errors import ApiError, ErrorKind, bad_request, short
from tableside.serving.service.service import Service

UNLOAD_DEPENDENTS = "unload_dependents"


async def change(
    service: Service, action: str, model: str, asked: dict[str, Any], authorization: bytes | None
) -> None:
    """Loads or unloads a model. ApiError: the caller may not, or the model cannot be loaded."""
    check_operator(service, authorization, f"{action} models")
    _check_parameters(asked, action)
    await (service.load_model(model) if action == "load" else service.unload_model(model))


def is_operator(service: Service, authorization: bytes | None) -> bool:
    """Returns whether a request has the server's admin token."""
    return has_token(authorization, service.admin_token)


def has_token(authorization: bytes | None, token: str | None) -> bool:
    """Returns whether a request has a token that there is."""
    scheme, _, given = (authorization or b"").partition(b" ")
    return (
        token is not None
        and scheme.lower() == b"bearer"
        and hmac.compare_digest(given.strip(), token.encode())
    )


def check_operator(service: Service, authorization: bytes | None, what: str) -> None:
    """ApiError: 403 without an admin token on the server, 401 without it in the request."""
    if service.admin_token is None:
        why = f"this server does not {what}: it has no admin token; start it with --admin-token-file FILE"
        raise ApiError(403, ErrorKind.DENIED, f"{why}, or with TABLESIDE_ADMIN_TOKEN in its environment")
    if not is_operator(service, authorization):
        raise ApiError(
            401,
            ErrorKind.DENIED,
            f"only an operator may {what}: the request's Authorization is not 'Bearer ' and this server's "
            "admin token",
            headers=((b"www-authenticate", b"Bearer"),),
        )


def _check_parameters(asked: dict[str, Any], action: str) -> None:
    parameters = asked.get("parameters", {})
    if not isinstance(parameters, dict):
        raise bad_request(f"parameters are {short(parameters)}; expected an object")
    if unknown := [name for name in parameters if action == "load" or name != UNLOAD_DEPENDENTS]:
        raise bad_request(
            f"{action} takes no parameter {short(unknown[0])}; a model is loaded as `tableside load` "
            "published it, so publish another version instead"
        )


def index(service: Service, asked: dict[str, Any], authorization: bytes | None) -> list[dict[str, str]]:
    """Lists the served models; for an operator also other published ones, unless {"ready": true}."""
    is_ready = asked.get("ready", False)
    if not isinstance(is_ready, bool):
        raise bad_request(f"ready is {short(is_ready)}; expected true or false")
    found = []
    for name, engine in service.engines.items():
        state = "READY" if service.ready and engine.is_usable else "UNAVAILABLE"
        if state == "READY" or not is_ready:
            found.append({"name": name, "version": str(engine.attached().version), "state": state})
    if not is_ready and is_operator(service, authorization):
        for model in _published(service):
            if model.name not in service.engines:
                newest = {"name": model.name, "version": str(model.versions()[-1])}
                found.append({**newest, "state": "UNAVAILABLE", "reason": "unloaded"})
    return found


def _published(service: Service) -> list[Any]:
    try:
        return [m for m in models(service.settings.root, service.settings.owner) if m.versions()]
    except (LoaderError, OSError) as error:
        what = "the folder of published models cannot be read; the server's log has the reason"
        raise ApiError(500, ErrorKind.INTERNAL, what) from error
