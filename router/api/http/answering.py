"""Shared parts of HTTP responses: JSON bodies, errors in the shape of each vendor's API, headers, disconnected
clients."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from holdfast.router.api.http.errors import http_error
from holdfast.router.api.http.event_stream import Shape
from holdfast.router.wire.resume_codec import HOLD
from holdfast.worker.errors import HoldfastError, InternalError

logger = logging.getLogger(__name__)

Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]

REQUEST_ID: Final = "x-request-id"
_LONGEST_HEADER: Final = 128  # characters


def answering(endpoint: Endpoint, shape: Shape) -> Callable[[Request], Awaitable[Any]]:
    """An endpoint whose errors are answered, in the words of its clients."""

    async def call(request: Request) -> ASGIApp:
        try:
            response = await endpoint(request)
        except HoldfastError as error:
            response = _error(error, shape)
        except ClientDisconnect:
            response = Response(status_code=499)  # its client is gone
        except Exception as bug:
            logger.exception("a request failed: internal error")
            response = _error(InternalError(f"the request failed: internal error ({type(bug).__name__})"), shape)
        if isinstance(response, Response):
            response.headers.update(headers_of(request))
        return response

    return call


def headers_of(request: Request) -> dict[str, str]:
    """Headers of every response: the caller's own name of its request comes back."""
    given = request.headers.get(REQUEST_ID, "")
    fine = given and len(given) <= _LONGEST_HEADER and given.isascii() and given.isprintable()
    own = {HOLD: "-"} if HOLD in request.headers else {}
    return {REQUEST_ID: given, **own} if fine else own


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Result of `work`; cancels it and raises `ClientDisconnect` once the client is gone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        del working, watching, task  # an error's traceback has this frame: they would be a cycle


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def not_found(request: Request, error: Exception) -> Response:
    """Paths and methods that are not there."""
    assert isinstance(error, HTTPException), "it is registered for these"
    described = {"message": f"{request.method} {request.url.path}: {error.detail}", "type": "invalid_request_error"}
    response = json_response({"error": {**described, "param": None, "code": "not_found"}})
    response.status_code = error.status_code
    response.headers.update({**(error.headers or {}), **headers_of(request)})
    return response


def json_response(content: Mapping[str, Any]) -> Response:
    return Response(json.dumps(content, ensure_ascii=False).encode(errors="replace"), media_type="application/json")


def _error(error: HoldfastError, shape: Shape) -> Response:
    answer = http_error(error)
    return Response(shape.body(answer), answer.status, answer.headers, media_type="application/json")
