"""Operators' calls of every API: permission, effect, and a state dump."""

import asyncio
import json
import logging
import platform
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from holdfast.router.cluster_control import ClusterControl
from holdfast.router.config import LimitsConfig, OverloadConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.links.replica_pins import ReplicaPins
from holdfast.router.operator_state import Change, OperatorState, Pause
from holdfast.router.overload.overload import Overload
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.gate import Gate
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, ReplicaError

SendChange = Callable[[Change], Awaitable[OperatorState]]
"""Applies a change at all routers. Returns the operator state after it; raises `CallerError`, `ReplicaError`."""


class Operators:
    """The orders of one router. Changes of the operator state return its new revision; errors are `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        dispatch_host: DispatchHost,
        *,
        gate: Gate,
        send: SendChange,
        operator_state: Callable[[], OperatorState],
        dump: Callable[[], str],
        pins: ReplicaPins,
        kill: Callable[[str], None] | None = None,
        control: ClusterControl | None = None,
    ) -> None:
        """`operator_state` returns the current operator state, `dump` the text of a state dump. `kill` ends a replica's
        process; None: killing is off (`router.killable`). `control` is None where the router runs outside a cluster.
        """
        self._request_processor = request_processor
        self._dispatch_host = dispatch_host
        self._gate = gate
        self._send = send
        self._operator_state = operator_state
        self._dump = dump
        self.pins = pins
        """Pins of all replicas."""
        self._kill = kill
        self._control = control

    @property
    def control(self) -> ClusterControl:
        """Changes of models, and logs. Raises `ReplicaError` where the router runs outside a cluster."""
        if self._control is None:
            raise ReplicaError("this router runs outside a Ray cluster: it has no models to change and no logs to read")
        return self._control

    def check(self, not_local: str = "") -> None:
        """Whether the caller of the running task may give orders. Raises `PermissionDeniedError`.

        With API keys, the key has passed the gate. Without keys the call must come from this machine: `not_local` says
        why it does not.
        """
        self._gate.caller().check_operator()
        if not_local and not self._gate.is_locked:
            message = f"without API keys, operators' calls are taken from this machine alone: {not_local}"
            raise PermissionDeniedError("operator", message)

    @property
    def may_kill(self) -> bool:
        return self._kill is not None

    async def kill(self, replica_id: str) -> int:
        """Ends the process of a replica at once, as its crash would. No order stands after that.

        Raises `PermissionDeniedError` unless the cluster was started for such a demonstration.
        """
        if self._kill is None:
            message = "router.killable is off: only a demonstration or a test that sets it lets replicas be killed"
            raise PermissionDeniedError("router.killable", message)
        self._check_known(replica_id)
        self._kill(replica_id)
        return self._operator_state().revision

    async def drain(self, replica_id: str) -> int:
        """Drains a replica, and returns the revision of the operator state. Raises InvalidRequestError."""
        self._check_known(replica_id)
        return await self._ordered("with_drained", replica_id, True)

    async def undrain(self, replica_id: str) -> int:
        """Puts a drained replica back into service."""
        drained = sorted(self._operator_state().drained)
        if replica_id not in drained:
            raise InvalidRequestError("replica_id", replica_id, f"drained are: {', '.join(drained) or 'none'}")
        return await self._ordered("with_drained", replica_id, False)

    async def pause(self, model: str, refuses: bool) -> int:
        """New requests of the model wait, or are refused."""
        name = self._request_processor.model(model).name
        return await self._ordered("with_pause", name, Pause(model=name, refuses=refuses))

    async def resume(self, model: str) -> int:
        return await self._ordered("with_pause", self._request_processor.model(model).name, None)

    async def load_adapter(
        self, model: str, name: str, path: str, *, replaces: bool = False, pinned: bool = False
    ) -> Adapter:
        """Serves the adapter in a folder under a name, once a replica has loaded it and computed a token with it.

        Raises `InvalidRequestError` for an adapter that is refused, or a name that is in use, unless this `replaces`
        it: then new requests get the new one, and running ones keep the old one. `pinned`: it stays resident in each
        replica from now on; otherwise it does not, as the last load says.
        """
        processor = self._request_processor
        base = processor.model(model)
        if name in self._dispatch_host.dispatch.registry.statuses:
            raise InvalidRequestError("lora_name", name, "is the name of a model that is served")
        adapter = await asyncio.to_thread(partial(Adapter.in_folder, name, path, pinned=pinned))
        found = processor.adapters.find(name)
        is_another = found is not None and (found.model, found.adapter.digest) != (base.name, adapter.digest)
        if found is not None and is_another and not replaces:
            limit = f"is another adapter already, {found.adapter.digest[:16]} of {found.model}"
            limit += "; replace it with load_inplace (--replace)"
            raise InvalidRequestError("lora_name", name, limit)
        slots = (base.facts.adapters, base.facts.max_loras or None)
        self._operator_state().with_adapter(base.name, name, adapter, *slots)  # refused before it is tried
        await processor.try_adapter(base.name, adapter)
        await self._ordered("with_adapter", base.name, name, adapter, *slots)
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """The name means nothing from now on; requests that run keep their adapter."""
        found = self._request_processor.adapters.find(name)
        if found is None:
            raise NotFoundError("adapter", name)
        await self._ordered("with_adapter", found.model, name, None)

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


_LIBRARIES: Final = ("holdfast", "grpcio", "protobuf", "tokenizers", "ray")


def state_dump(
    host: DispatchHost,
    operator_state: OperatorState,
    config: RouterConfig,
    limits: LimitsConfig,
    recent_errors: Sequence[str],
    num_paused: int,
    overload: Overload,
    protection: OverloadConfig,
) -> str:
    """One JSON object, with its keys in order."""
    state = {
        "releases": {"python": sys.version.split()[0], "platform": platform.platform()} | _releases(),
        "models": {
            one.name: {"num_replicas": one.num_replicas, "fingerprint": one.facts.fingerprint}
            | {"max_model_len": one.facts.max_model_len, "num_blocks": one.facts.num_blocks}
            for one in host.dispatch.models()
        },
        "replicas": [asdict(one) for one in host.dispatch.loads()],
        "versions": [asdict(one) for one in host.dispatch.version_counts()],
        "requests": {
            "open": host.dispatch.num_open,
            "queued": host.dispatch.num_queued,
            "resent": host.dispatch.stats.failovers.total(),
            "paused": num_paused,
            "suspended": host.dispatch.num_suspended,
        },
        "overload": overload_state(overload),
        "orders": asdict(operator_state),
        "recent_errors": list(recent_errors),
        "settings": {
            name: one.model_dump(mode="json")
            for name, one in (("router", config), ("limits", limits), ("overload", protection))
        },
    }
    return json.dumps(state, indent=1, default=_plain)


def overload_state(overload: Overload) -> dict[str, Any]:
    """Pressures, the active actions with their causes, counts of each action, bytes in flight."""
    return {
        "pressures": {str(name): round(pressure, 3) for name, pressure in overload.pressures.items()},
        "active": {str(action): str(resource) for action, resource in overload.active.items()},
        "counts": {str(action): count for action, count in overload.counts.items()},
        "bytes_in_flight": overload.ledger.num_bytes,
        "over_budget": dict(overload.ledger.refusals),
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _releases() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


MOST: Final = 100  # records
MAX_LENGTH: Final = 500  # characters of a record


class RecentErrors(logging.Handler):
    """The last `MOST` records of at least WARNING of the loggers that it is added to."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[str] = deque(maxlen=MOST)

    @property
    def lines(self) -> list[str]:
        """Oldest first."""
        return list(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a warning or an error for health."""
        try:
            self._lines.append(_line(record)[:MAX_LENGTH])
        except Exception:  # noqa: BLE001 - as in every handler: the caller that logs goes on
            self.handleError(record)


def _line(record: logging.LogRecord) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    kind = record.exc_info[0] if record.exc_info else None  # False, where a caller says so
    error = "" if kind is None else f" ({kind.__name__})"
    return f"{when} {record.levelname} {record.name}: {record.getMessage()}{error}"
