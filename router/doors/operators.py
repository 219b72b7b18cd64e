"""Operators' calls, whatever door they come by: who may make them, what each orders, and a state dump.

What may not live here: messages, headers and addresses (`grpc/admin.py`, `http/admin.py`), how orders reach the routers
(`cluster/serve/directory.py`), and what obeys them.
"""

from collections.abc import Awaitable, Callable

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.orders import Change, Orders, Pause
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.gate import Gate
from holdfast.worker.errors import InvalidRequestError, PermissionDeniedError

SendChange = Callable[[Change], Awaitable[Orders]]
"""Has a change obeyed by all routers. Returns what holds then; raises `CallerError`, `ReplicaError`."""


class Operators:
    """The orders of one router. Each call returns the orders' new revision; errors are raised as `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        dispatch_host: DispatchHost,
        *,
        gate: Gate,
        send: SendChange,
        orders: Callable[[], Orders],
        dump: Callable[[], str],
        kill: Callable[[str], None] | None = None,
    ) -> None:
        """`orders` are those that hold now, `dump` the text of a state dump. `kill` ends a replica's process; None:
        nobody may, as `router.killable` has it.
        """
        self._request_processor = request_processor
        self._dispatch_host = dispatch_host
        self._gate = gate
        self._send = send
        self._orders = orders
        self._dump = dump
        self._kill = kill

    def check(self, not_local: str = "") -> None:
        """Whether the caller of the running task may give orders. Raises `PermissionDeniedError`.

        Where keys are asked for, the key has passed the gate. Without keys the call must come from this machine:
        `not_local` says why it does not.
        """
        self._gate.caller().check_operator()
        if not_local and not self._gate.is_locked:
            told = f"without API keys, operators' calls are taken from this machine alone: {not_local}"
            raise PermissionDeniedError("operator", told)

    @property
    def may_kill(self) -> bool:
        return self._kill is not None

    async def kill(self, replica_id: str) -> int:
        """Ends the process of a replica at once, as its crash would. No order stands after that.

        Raises `PermissionDeniedError` unless the cluster was started for such a demonstration.
        """
        if self._kill is None:
            told = "router.killable is off: only a demonstration or a test that sets it lets replicas be killed"
            raise PermissionDeniedError("router.killable", told)
        self._check_known(replica_id)
        self._kill(replica_id)
        return self._orders().revision

    async def drain(self, replica_id: str) -> int:
        self._check_known(replica_id)
        return await self._ordered("with_drained", replica_id, True)

    async def undrain(self, replica_id: str) -> int:
        drained = sorted(self._orders().drained)
        if replica_id not in drained:
            raise InvalidRequestError("replica_id", replica_id, f"drained are: {', '.join(drained) or 'none'}")
        return await self._ordered("with_drained", replica_id, False)

    async def pause(self, model: str, refuses: bool) -> int:
        """New requests of the model wait, or are refused."""
        name = self._request_processor.model(model).name
        return await self._ordered("with_pause", name, Pause(model=name, refuses=refuses))

    async def resume(self, model: str) -> int:
        return await self._ordered("with_pause", self._request_processor.model(model).name, None)

    async def set_log_level(self, level: str) -> int:
        return await self._ordered("with_log_level", level)

    def dump(self) -> str:
        """The router's state as JSON text, without keys, prompts and outputs."""
        return self._dump()

    def _check_known(self, replica_id: str) -> None:
        known = sorted(one.replica_id for one in self._dispatch_host.dispatch.loads())
        if replica_id not in known:
            raise InvalidRequestError("replica_id", replica_id, f"must be one of {', '.join(known) or 'none'}")

    async def _ordered(self, change: str, *arguments: object) -> int:
        return (await self._send(Change(change, arguments))).revision
