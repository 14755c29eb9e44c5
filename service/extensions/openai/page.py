"""A web page to chat with the models: shows each token and its alternatives, and branches from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from service.extensions.openai.middleware import Access, GuardedRoute

# The files have no secrets: their requests need the user's token.
_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    # Allows only these files and requests to this server.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> list[GuardedRoute]:
    """Returns a route for each file."""
    directory = resources.files("service.extensions.openai").joinpath("static")
    return [
        GuardedRoute(path, _file(directory.joinpath(name).read_bytes(), kind), Access.PUBLIC)
        for path, (name, kind) in _FILES.items()
    ]


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_request: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer
