"""Command `holdfast stats`: load and cache figures of a running cluster's replicas, as one router knows them."""

import asyncio
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.cluster.config.flags import takes_settings
from holdfast.cluster.config.layers import Layer

_PIPE_WIDTH = 200
"""Columns where the output is no terminal: wide enough that no row is broken."""

_COLUMNS = (
    "replica", "running", "waiting", "used", "cached", "free", "wasted", "hit rate", "shared", "drafts", "evictions",
    "preemptions", "expired", "tokens/s"
)  # fmt: skip


@takes_settings("client")
def stats(
    *,
    server: Annotated[str, Parameter(help="host:port of a running router")] = "localhost:50051",
    settings: Layer,
) -> int:
    """Show how busy a running cluster's replicas are, and what their caches do.

    Blocks are used by requests, or free; cached ones are free and still hold a prefix; slots of used ones that hold no
    token are wasted. Completions of one request have shared so many tokens; of drafts, the share that came true. Counts
    are since a replica's start, as of one of its last steps; tokens/s are output tokens in a second of stepping. A
    dash: not reported yet, or there were none.
    """
    from rich.console import Console
    from rich.table import Table

    from holdfast.cluster.config.config import load_config

    load = asyncio.run(_load(server, load_config(settings).config.client.options))
    table = Table(_COLUMNS[0], box=None, pad_edge=False)
    for column in _COLUMNS[1:]:
        table.add_column(column, justify="right")
    for replica in sorted(load.replicas, key=lambda replica: str(replica.model)):
        table.add_row(*_row(replica))
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    console.print(table if load.replicas else "no replica is up: requests wait for one (router.replica_wait_s)")
    requests = "request" if load.num_open == 1 else "requests"
    console.print(f"{load.num_open} {requests} open in this router, {load.num_queued} of them waiting for a replica")
    return 0


async def _load(server: str, options: dict[str, Any]) -> Any:
    """A `holdfast.v1.GetLoadResponse`."""
    from holdfast.cluster.client.async_client import AsyncClient

    async with AsyncClient(server, **options) as client:
        return await client.get_load()


def _row(replica: Any) -> list[str]:
    """`replica` is a `holdfast.v1.ReplicaLoad`."""
    used = replica.num_total_blocks - replica.num_free_blocks
    now = [f"{replica.model} {replica.replica_id}", str(replica.num_running), str(replica.num_waiting), str(used)]
    if not replica.HasField("stats"):
        return [*now, "-", str(replica.num_free_blocks), *["-"] * (len(_COLUMNS) - len(now) - 2)]
    stats = replica.stats
    tokens_per_s = stats.num_tokens_generated / stats.step_time_s if stats.step_time_s else 0.0
    blocks = [stats.num_cached_blocks, replica.num_free_blocks, stats.num_wasted_slots]
    shares = [
        _share(stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens),
        str(stats.num_forked_tokens),
        _share(stats.num_accepted_tokens, stats.num_draft_tokens),
    ]
    losses = [stats.num_evictions, stats.num_preemptions, stats.num_expired]
    return [*now, *map(str, blocks), *shares, *map(str, losses), f"{tokens_per_s:.0f}"]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
