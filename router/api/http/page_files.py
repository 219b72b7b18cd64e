"""The page that every router serves at `/`: a chat, and a view of the cluster. Files without a build step.

They are static and hold no data: the page reads its data from the endpoints that all clients call, with the reader's
key.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from holdfast.router.api.operators import overload_state
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import ModelStatus, ReplicaLoad
from holdfast.router.overload.overload import Overload
from holdfast.router.requests.session_book import Session, SessionBook, prompt_speeds, saved_s

FOLDER: Final = Path(__file__).parent / "page"

PAGE: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/stream.js": ("stream.js", "text/javascript"),
    "/page/cluster.js": ("cluster.js", "text/javascript"),
}
"""File and media type by path."""

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Headers of the page: nothing is loaded from elsewhere, nothing inline runs, and no site frames it."""


def page_file(path: str) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The endpoint of one file."""
    name, media_type = PAGE[path]

    async def answer(request: Request) -> ASGIApp:
        return Response(_content(name), headers={"content-type": f"{media_type}; charset=utf-8", **HEADERS})

    return answer


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


MAX_SHOWN_SESSIONS: Final = 50  # rows of the page's table


def cluster_view(
    host: DispatchHost, overload: Overload | None = None, sessions: SessionBook | None = None, *, is_killable: bool
) -> dict[str, Any]:
    """View of the cluster for JSON. `is_killable`: operators may end replicas."""
    now = host.now()
    book = sessions or SessionBook()
    speeds = prompt_speeds(host.dispatch.loads())
    return {
        "is_killable": is_killable,
        "open": host.dispatch.num_open,
        "queued": host.dispatch.num_queued,
        "suspended": host.dispatch.num_suspended,
        "overload": None if overload is None else overload_state(overload),
        "waiting": [
            {"model": model, "class": priority, "tenant": tenant, "count": count}
            for (model, priority, tenant), count in sorted(host.dispatch.waiting().items())
        ],
        "models": [_model(one) for one in host.dispatch.models()],
        "replicas": [_replica(one) for one in host.dispatch.loads()],
        "sessions": [_session(one, now, speeds) for one in book.sessions()[:MAX_SHOWN_SESSIONS]],
        "spoiled": [
            {"tenant": one.tenant, "rule": one.rule, "requests": one.num_requests, "tokens": one.num_tokens}
            for one in book.spoiled()
        ],
        "failovers": sum(host.dispatch.stats.failovers.values()),
        "events": [
            {
                "age_s": round(now - one.at_s, 1),
                "kind": one.kind,
                "replica_id": one.replica_id,
                "model": one.model,
                "reason": one.reason,
                "num_requests": one.num_requests,
            }
            for one in reversed(host.news)
        ],
    }


def _session(one: Session, now: float, speeds: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": one.name,
        "tenant": one.tenant,
        "model": one.model,
        "turns": one.num_turns,
        "prompt_tokens": one.num_prompt_tokens,
        "memory_tokens": one.num_memory_tokens,
        "disk_tokens": one.num_disk_tokens,
        "computed_tokens": one.num_computed_tokens,
        "saved_s": round(saved_s(one, speeds), 3),
        "age_s": round(now - one.last_s, 1),
        "kept_s": round(max(0.0, one.kept_until_s - now)),
    }


def _model(one: ModelStatus) -> dict[str, Any]:
    return {
        "model": one.name,
        "num_replicas": one.num_replicas,
        "quantization": one.facts.quantization,
        "weight_bytes": one.facts.weight_bytes,
    }


def _replica(one: ReplicaLoad) -> dict[str, Any]:
    load, stats = one.load, one.stats
    said: dict[str, Any] = {
        "replica_id": one.replica_id,
        "model": one.model,
        "num_ranks": one.num_ranks,
        "is_retiring": one.is_retiring,
        "role": one.role,
        "received_from": dict(one.received_from),
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_used_blocks": load.num_total_blocks - load.num_free_blocks,
        "num_total_blocks": load.num_total_blocks,
    }
    if stats is not None:
        said |= {
            "num_cached_blocks": min(stats.num_cached_blocks, load.num_free_blocks),
            "num_disk_blocks": stats.num_disk_blocks,
            "num_received_tokens": stats.num_received_tokens,
            "prefix_hit_rate": stats.prefix_hit_rate,
            "num_tokens_generated": stats.num_tokens_generated,
            "num_preemptions": stats.num_preemptions,
            "acceptance": stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else None,
            "num_steps": stats.num_steps,
            "plan_time_s": stats.plan_time_s,
            "run_time_s": stats.step_time_s,
            "commit_time_s": stats.commit_time_s,
        }
    return said
