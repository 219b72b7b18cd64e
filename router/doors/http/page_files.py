"""The page that every router serves at `/`: a chat, and a view of the cluster. Files without a build step.

They are the same for everyone and know nothing: what they show is asked for by the endpoints that all clients call,
with the reader's key. What may not live here: what the page does (`page/`), keys.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

FOLDER: Final = Path(__file__).parent / "page"

PAGE: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/stream.js": ("stream.js", "text/javascript"),
    "/page/cluster.js": ("cluster.js", "text/javascript"),
}
"""By path: the file and its type."""

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Nothing is loaded from elsewhere, nothing inline runs, and no site frames it."""


def page_file(path: str) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The endpoint of one file."""
    name, media_type = PAGE[path]

    async def answer(request: Request) -> ASGIApp:
        return Response(_content(name), headers={"content-type": f"{media_type}; charset=utf-8", **HEADERS})

    return answer


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
