"""HTTP endpoints of operators, `/admin/...`: the calls of gRPC's `holdfast.v1.AdminService` but
for models and logs, and the page's kill.

Without keys, this machine alone gives orders, whatever other hosts the server answers for (`request_origin.py`): the
caller's address and the name that it calls the server by must both be of loopback, and no proxy may have sent it on.
"""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.json_body import Reads
from holdfast.router.api.http.request_origin import JSON, host_name, is_loopback
from holdfast.router.api.operators import Operators
from holdfast.router.wire.json_bounds import JsonBounds
from holdfast.worker.errors import InvalidRequestError

MAX_BYTES: Final = 4096
"""Most bytes of a command's body, which is read on the event loop."""

_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip")


class OrderBody(Reads):
    """An operator's command without fields. Undeclared fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


class PauseBody(OrderBody):
    """Which model's new requests wait; with `refuse` they are refused."""

    model: str = ""
    refuse: bool = False


class ResumeBody(OrderBody):
    """Which model goes on."""

    model: str = ""


class LogLevelBody(OrderBody):
    """Body of a log level change: DEBUG, INFO, WARNING or ERROR."""

    level: str


class UnpinBody(OrderBody):
    """Tenant whose pins end: all, or that of one prefix, as `GET /admin/pins` names it."""

    tenant: str
    prefix: str = ""


class LoadAdapterBody(OrderBody):
    """The folder of an adapter, and the name that requests give as their model; `model` is the base's, if there are
    several. `load_inplace` replaces another adapter of that name; a `pinned` one stays resident in each replica.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool = False
    model: str = ""


class UnloadAdapterBody(OrderBody):
    """Name of an adapter; the number that vLLM has is not read."""

    lora_name: str
    lora_int_id: int | None = None


class AdminEndpoints:
    """The endpoints, for the application's table of routes."""

    bodies: ClassVar[dict[str, tuple[type[Reads], str]]] = {
        "/admin/replicas/{replica_id}/drain": (
            OrderBody,
            "Drains a replica: it gets no new requests, and its running requests move.",
        ),
        "/admin/replicas/{replica_id}/undrain": (OrderBody, "Puts a drained replica back into service."),
        "/admin/replicas/{replica_id}/kill": (
            OrderBody,
            "Kills a replica's process; only where router.killable is on.",
        ),
        "/admin/pause": (PauseBody, "Pauses a model: its new requests wait, or are refused."),
        "/admin/resume": (ResumeBody, "Resumes a paused model."),
        "/admin/log-level": (LogLevelBody, "Sets the log level of routers and replicas."),
        "/admin/unpin": (UnpinBody, "Ends pins of a tenant before their time is up."),
        "/v1/load_lora_adapter": (LoadAdapterBody, "Serves a LoRA adapter under its own name."),
        "/v1/unload_lora_adapter": (UnloadAdapterBody, "Unloads a LoRA adapter."),
    }

    def __init__(
        self, operators: Operators, content: Callable[[Request], Awaitable[bytes]], bounds: JsonBounds | None = None
    ) -> None:
        """`content` reads a request's body."""
        self._bounds = bounds
        self._operators = operators
        self._content = content

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        orders: dict[str, Callable[[Any, str], Awaitable[int | str | dict[str, Any]]]] = {
            "/admin/replicas/{replica_id}/drain": lambda _, replica_id: self._operators.drain(replica_id),
            "/admin/replicas/{replica_id}/undrain": lambda _, replica_id: self._operators.undrain(replica_id),
            "/admin/replicas/{replica_id}/kill": lambda _, replica_id: self._operators.kill(replica_id),
            "/admin/pause": lambda body, _: self._operators.pause(body.model, body.refuse),
            "/admin/resume": lambda body, _: self._operators.resume(body.model),
            "/admin/log-level": lambda body, _: self._operators.set_log_level(body.level),
            "/admin/unpin": lambda body, _: self._unpin(body),
            "/v1/load_lora_adapter": lambda body, _: self._load_adapter(body),
            "/v1/unload_lora_adapter": lambda body, _: self._unload_adapter(body),
        }
        posts = [("POST", path, self._order(self.bodies[path][0], order)) for path, order in orders.items()]
        return [*posts, ("GET", "/admin/state", self.state), ("GET", "/admin/pins", self.pins)]

    async def _unpin(self, body: UnpinBody) -> dict[str, Any]:
        num_blocks, unheard = await self._operators.pins.unpin(body.tenant, body.prefix)
        return {"num_blocks": num_blocks, "unheard": [one._asdict() for one in unheard]}

    async def pins(self, request: Request) -> ASGIApp:
        """Answers `GET /admin/pins`."""
        self._operators.check(_not_local(request))
        pins, unheard = await self._operators.pins.listed()
        return json_response({"pins": [one._asdict() for one in pins], "unheard": [one._asdict() for one in unheard]})

    async def _load_adapter(self, body: LoadAdapterBody) -> str:
        name = body.lora_name
        await self._operators.load_adapter(
            body.model, name, body.lora_path, replaces=body.load_inplace, pinned=body.pinned
        )
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unload_adapter(self, body: UnloadAdapterBody) -> str:
        await self._operators.unload_adapter(body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    async def state(self, request: Request) -> ASGIApp:
        """Answers `GET /admin/state`."""
        self._operators.check(_not_local(request))
        return Response(self._operators.dump(), media_type=JSON)

    def _order(self, body: type[Reads], order: Callable[[Any, str], Awaitable[int | str | dict[str, Any]]]) -> Endpoint:
        """An order's answer is its revision, a text, or an object."""

        async def call(request: Request) -> ASGIApp:
            self._operators.check(_not_local(request))
            content = await self._content(request)
            if len(content) > MAX_BYTES:
                raise InvalidRequestError("body", len(content), f"a command must have at most {MAX_BYTES} bytes")
            read = body.read(content or b"{}", self._bounds)
            done = await order(read, request.path_params.get("replica_id", ""))
            if isinstance(done, str):
                return Response(done, media_type="text/plain")
            return json_response({"revision": done} if isinstance(done, int) else done)

        return call


def _not_local(request: Request) -> str:
    """The reason why the call does not come from a user of this machine; empty: it does."""
    headers, client = request.headers, request.client
    if client is None or not is_loopback(client.host):
        return f"this one comes from {client.host if client else 'nowhere'}"
    if forwarded := [name for name in _FORWARDED if name in headers]:
        return f"this one was sent on ({forwarded[0]})"
    if not is_loopback(host_name(headers.get("host", ""))):
        return "this one has another host name than localhost"
    return ""
