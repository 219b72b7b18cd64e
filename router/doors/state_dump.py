"""State dump of a router, for a bug report: settings, models, replicas, queues, orders, counts, recent errors.

No keys, tokens, prompts, outputs or request ids. What may not live here: who may ask (`router/doors/grpc/admin.py`).
"""

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from holdfast.router.config import LimitsConfig, OverloadConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.orders import Orders
from holdfast.router.overload.overload import Overload

_LIBRARIES: Final = ("holdfast", "grpcio", "protobuf", "tokenizers", "ray")


def state_dump(
    host: DispatchHost,
    orders: Orders,
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
        "orders": asdict(orders),
        "recent_errors": list(recent_errors),
        "settings": {
            name: one.model_dump(mode="json")
            for name, one in (("router", config), ("limits", limits), ("overload", protection))
        },
    }
    return json.dumps(state, indent=1, default=_plain)


def overload_state(overload: Overload) -> dict[str, Any]:
    """Pressures, the actions that are on with what they are on for, counts of what each has done, bytes in flight."""
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
