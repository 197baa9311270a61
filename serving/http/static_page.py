"""The page for people at `/`: a few files of ours that a browser shows, by what /v1/models and /metrics say.

It asks by GET alone, and may load nothing from another host: its Content-Security-Policy says so to the
browser.
"""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def add_to(app: FastAPI) -> None:
    """Serves the page at `/` and its files below `/page/`."""
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in _TYPES:
            _add(
                app,
                "/" if file.name == "index.html" else f"/page/{file.name}",
                file.read_bytes(),
                _TYPES[file.suffix],
            )


def _add(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def _() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)
