"""`holdfast stats`: how busy a running cluster's replicas are, and what their caches do, as one router knows it."""

import asyncio
import sys
from typing import Annotated, Any

from cyclopts import Parameter

_PIPE_WIDTH = 200
"""Columns of the output that nobody looks at: a row is never broken."""

_COLUMNS = (
    "replica", "running", "waiting", "used", "cached", "free", "hit rate", "evictions", "preemptions", "tokens/s"
)  # fmt: skip


def stats(*, server: Annotated[str, Parameter(help="host:port of a running router")] = "localhost:50051") -> int:
    """Show how busy a running cluster's replicas are, and what their caches do.

    Blocks are used by requests, or free; cached ones are free and still hold a prefix. Counts are since a replica's
    start, as of one of its last steps; tokens/s are output tokens in a second of stepping. A dash: not told yet.
    """
    from rich.console import Console
    from rich.table import Table

    load = asyncio.run(_load(server))
    table = Table(_COLUMNS[0], box=None, pad_edge=False)
    for column in _COLUMNS[1:]:
        table.add_column(column, justify="right")
    for replica in load.replicas:
        table.add_row(*_row(replica))
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    console.print(table)
    console.print(f"{load.num_open} requests open in this router, {load.num_queued} of them waiting for a replica")
    return 0


async def _load(server: str) -> Any:
    """A `holdfast.v1.GetLoadResponse`."""
    from cluster.client import AsyncClient

    async with AsyncClient(server) as client:
        return await client.get_load()


def _row(replica: Any) -> list[str]:
    """`replica` is a `holdfast.v1.ReplicaLoad`."""
    used = replica.num_total_blocks - replica.num_free_blocks
    now = [replica.replica_id, str(replica.num_running), str(replica.num_waiting), str(used)]
    if not replica.HasField("stats"):
        return [*now, "-", str(replica.num_free_blocks), "-", "-", "-", "-"]
    told = replica.stats
    hit_rate = told.num_prefix_hit_tokens / max(1, told.num_prefix_query_tokens)
    tokens_per_s = told.num_tokens_generated / told.step_time_s if told.step_time_s else 0.0
    counts = [f"{hit_rate:.0%}", str(told.num_evictions), str(told.num_preemptions), f"{tokens_per_s:.0f}"]
    return [*now, str(told.num_cached_blocks), str(replica.num_free_blocks), *counts]
