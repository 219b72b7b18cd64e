"""Commands `holdfast status`, the health of a cluster (routers, models, replicas, load, caches), and `holdfast stats`,
the statistics of its replicas.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from cyclopts import Parameter

from holdfast.cluster.config.flags import takes_settings
from holdfast.cluster.config.layers import Layer
from holdfast.worker.errors import ConfigurationError, HoldfastError
from holdfast.worker.process_memory import readable_bytes

_WIDTH: Final = 120
"""Columns where the output is no terminal."""


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """Status of one router. `load` and `models` are messages of `holdfast.v1`, or `error` says why there are none."""

    address: str
    load: Any = None
    models: Any = None
    error: str = ""


@takes_settings("client")
def status(
    *,
    server: Annotated[str, Parameter(help="host:port of routers, separated by commas")] = "localhost:50051",
    watch: Annotated[bool, Parameter(name=["--watch", "-w"], negative=(), help="refresh until Ctrl-C")] = False,
    every: Annotated[float, Parameter(help="seconds between refreshes of --watch")] = 1.0,
    settings: Layer,
) -> int:
    """Show whether a cluster is well: its routers, models, replicas, load and caches.

    Exit code 0: all routers answer, and every model has a replica; 1: not so.
    """
    from holdfast.cluster.config.config import load_config

    if not every > 0:
        raise ConfigurationError(f"--every {every}: must be above 0 seconds")
    options = load_config(settings).config.client.options
    return asyncio.run(_status(server.split(","), options, every if watch else None))


async def _status(addresses: list[str], options: dict[str, Any], every_s: float | None) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    found = await _ask_all(addresses, options)
    if every_s is None:
        console.print(view(found))
        return 0 if is_well(found) else 1
    with Live(view(found), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            await asyncio.sleep(every_s)
            found = await _ask_all(addresses, options)
            live.update(view(found), refresh=True)


async def _ask_all(addresses: list[str], options: dict[str, Any]) -> list[RouterStatus]:
    return list(await asyncio.gather(*(_ask(address, options) for address in addresses)))


async def _ask(address: str, options: dict[str, Any]) -> RouterStatus:
    from holdfast.cluster.client.async_client import AsyncClient

    try:
        async with AsyncClient(address, connect_s=1.0, **options) as client:
            return RouterStatus(address, await client.get_load(), await client.list_models())
    except HoldfastError as error:
        return RouterStatus(address, error=str(error))


def is_well(routers: list[RouterStatus]) -> bool:
    return all(not one.error and one.models.models and _all_served(one) for one in routers)


def _all_served(router: RouterStatus) -> bool:
    return all(model.num_replicas for model in router.models.models)


def view(routers: list[RouterStatus]) -> Any:
    """A renderable for a console."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[Any] = [Text(line, style=style) for router in routers for line, style in _router_lines(router)]
    answering = next((router for router in routers if not router.error), None)
    if answering is None:
        return Group(*shown)
    head = ("model", "replicas", "tensor parallel", "context", "quantization", "weights", "exact")
    models = Table(*head, box=None, pad_edge=False)
    for model in answering.models.models:
        exact = "row by row" if model.row_invariant else "no: see `holdfast doctor`"
        sizes = (str(model.num_replicas), str(model.tensor_parallel_size), str(model.max_model_len))
        weights = readable_bytes(model.weight_bytes) if model.weight_bytes else "-"
        models.add_row(Text(model.name), *sizes, model.quantization or "-", weights, exact)
    head = ("replica", "running", "waiting", "KV cache", "prefix hits", "preempted", "tokens/s")
    replicas = Table(*head, box=None, pad_edge=False)
    for replica in sorted(answering.load.replicas, key=lambda one: (one.model, one.replica_id)):
        replicas.add_row(*_replica_row(replica))
    return Group(*shown, Text(), models, Text(), replicas, *map(Text, _transfer_lines(answering.load.replicas)))


def _transfer_lines(replicas: Iterable[Any]) -> list[str]:
    """Lines of blocks that went from replica to replica, the most first, after an empty one."""
    pairs = [
        (num_tokens, sender, replica.replica_id)
        for replica in replicas
        for sender, num_tokens in replica.received_tokens_from.items()
    ]
    lines = [f"{sender} -> {receiver}: {count:,} tokens" for count, sender, receiver in sorted(pairs, reverse=True)]
    return ["", "blocks sent between replicas", *lines] if lines else []


def _router_lines(router: RouterStatus) -> list[tuple[str, str]]:
    if router.error:
        return [(f"router {router.address}: does not answer: {router.error}", "red")]
    load = router.load
    lines = [(f"router {router.address}: {load.num_open} requests open, {load.num_queued} waiting for a replica", "")]
    if load.HasField("store"):
        lines.append((f"  {_store_line(load.store)}", ""))
    lines += [(f"  {_spoiled_line(one)}", "yellow") for one in load.spoiled]
    up = Counter(replica.model for replica in load.replicas)
    lines += [
        (f"  model {model.name} has no replica: its requests wait or are refused", "red")
        for model in router.models.models
        if not up[model.name]
    ]
    if not router.models.models:
        lines.append(("  no replica has connected yet: requests wait for one (router.replica_wait_s)", "red"))
    return lines


def _spoiled_line(spoiled: Any) -> str:
    client = f"tenant {spoiled.tenant}" if spoiled.tenant else "clients without a tenant"
    cost = f"{spoiled.num_requests} requests computed {spoiled.num_tokens} prompt tokens behind it"
    return f"{client}: a line that changes spoils the cache: {cost}; --head-line-rules ...,{spoiled.rule} moves it"


def _store_line(store: Any) -> str:
    size = f"{readable_bytes(store.num_bytes)} of {readable_bytes(store.max_bytes)}"
    jobs = f"{store.num_jobs_running} background jobs running, {store.num_jobs_waiting} waiting"
    oldest = f", the oldest for {store.oldest_job_s:.0f} s" if store.oldest_job_s else ""
    return f"store: {store.num_objects} objects, {size}; {jobs}{oldest}"


def _replica_row(replica: Any) -> list[str]:
    used = replica.num_total_blocks - replica.num_free_blocks
    cache = f"{used / replica.num_total_blocks:.0%} of {replica.num_total_blocks}" if replica.num_total_blocks else "-"
    name = f"{replica.model} {replica.replica_id}" + (f" ({replica.role})" if replica.role else "")
    row = [name, str(replica.num_running), str(replica.num_waiting), cache]
    if not replica.HasField("stats"):
        return [*row, "-", "-", "-"]
    stats = replica.stats
    if stats.disk_bytes:
        row[-1] += f", {stats.num_disk_blocks} on disk"
    if stats.received_bytes or stats.sent_bytes:
        sent, received = readable_bytes(stats.sent_bytes), readable_bytes(stats.received_bytes)
        row[-1] += f", {received} received, {sent} sent"
    hits, asked = stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens
    speed = stats.num_tokens_generated / stats.step_time_s if stats.step_time_s else 0.0
    return [*row, f"{hits / asked:.0%}" if asked else "-", str(stats.num_preemptions), f"{speed:.0f}"]


# --- statistics of replicas ---


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

    Blocks are used by requests, or free; cached blocks are free and still hold a prefix; slots of used blocks without a
    token are wasted. Tokens that completions of one request share, and the share of accepted draft tokens. Counts are
    since a replica's start, as of one of its last steps; tokens/s are output tokens in a second of stepping. A dash:
    not reported yet, or there were none.
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
