"""Methods: HEAD wherever there is GET, and 405 with Allow for any other."""

import json
from typing import Any

import httpx
import pytest

GETS = (
    "/v1/models",
    "/health",
    "/metrics",
    "/openapi.json",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/demo",
)
GETS += (
    *(f"/v2/models/demo/{what}" for what in ("ready", "config", "stats", "versions/1")),
    "/v2/models/stats",
)
POSTS = (
    "/v1/lookup",
    "/v1/score",
    "/v2/models/demo/infer",
    "/v2/repository/index",
    "/v2/repository/models/demo/load",
)


@pytest.mark.parametrize("path", GETS)
@pytest.mark.drawn(6)
def test_head_is_get_without_its_body(server: Any, path: str) -> None:
    with httpx.Client(base_url=server.url) as client:
        head, got = client.head(path), client.get(path)
    assert head.status_code == got.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    if path not in ("/metrics", "/v2/models/stats", "/v2/models/demo/stats"):  # those count on
        assert head.headers["content-length"] == str(len(got.content))


@pytest.mark.drawn(20)
@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_what_is_got_is_not_posted(server: Any, path: str, method: str) -> None:
    found = httpx.request(method, server.url + path)
    assert (
        found.status_code == 405 and found.headers["allow"] == "GET, HEAD" and list(found.json()) == ["error"]
    )


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "TRACE"])
@pytest.mark.drawn(12)
def test_what_is_posted_is_not_got(server: Any, path: str, method: str) -> None:
    found = httpx.request(method, server.url + path)
    assert found.status_code == 405 and found.headers["allow"] == "POST"


def test_paths_that_are_not_there_are_404_whatever_the_method(server: Any) -> None:
    for method in ("GET", "POST", "PUT", "HEAD"):
        assert httpx.request(method, server.url + "/nothing").status_code == 404


def test_health_has_the_bodies_of_the_protocol(server: Any) -> None:
    assert server.get("/v2/health/live").json() == {"live": True}
    assert server.get("/v2/health/ready").json() == {"ready": True}
    assert server.get("/v2/models/demo/ready").json() == {"name": "demo", "ready": True}
    assert server.get("/v2/models/demo/versions/1/ready").json() == {"name": "demo", "ready": True}
    assert json.loads(server.get("/v2/models/nothing/ready").content)["error"].startswith(
        "model 'nothing' is not served here"
    )
