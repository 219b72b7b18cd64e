"""Commands of operators: `holdfast drain-node`, `drain`, `undrain`, `pause`, `resume`, `pins`, `unpin`, `log-level` and
`dump`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from holdfast.cluster.config.flags import takes_settings
from holdfast.cluster.config.layers import Layer

Server = Annotated[
    str, Parameter(help="host:port of a running router; the change applies to all routers of its cluster")
]
Model = Annotated[str, Parameter(help="the model's name in the API")]
Replica = Annotated[str, Parameter(help="the replica's id, as `holdfast stats` shows it")]

Seconds = Annotated[float, Parameter(validator=Number(gte=0))]

_LOCAL = "localhost:50051"
_PIPE_WIDTH = 160
"""Columns where the output is no terminal: no row is broken."""


@takes_settings("client")
def drain(replica: Replica, /, *, server: Server = _LOCAL, settings: Layer) -> int:
    """Take a replica out of service: it gets no new requests; its running requests move to other replicas, or
    finish.
    """
    _ask(server, settings, "Drain", replica_id=replica)
    print(f"replica {replica} drains; `holdfast undrain {replica}` puts it back into service")
    return 0


@takes_settings("client")
def undrain(replica: Replica, /, *, server: Server = _LOCAL, settings: Layer) -> int:
    """Put a replica that was drained back into service."""
    _ask(server, settings, "Undrain", replica_id=replica)
    print(f"replica {replica} is back in service")
    return 0


@takes_settings("client")
def pause(
    model: Model,
    /,
    *,
    refuse: Annotated[bool, Parameter(help="refuse new requests instead of letting them wait", negative=())] = False,
    server: Server = _LOCAL,
    settings: Layer,
) -> int:
    """Let new requests of a model wait until `holdfast resume`. Running requests continue."""
    _ask(server, settings, "Pause", model=model, refuse=refuse)
    print(f"{model} is paused: new requests {'are refused' if refuse else 'wait'}")
    return 0


@takes_settings("client")
def resume(model: Model, /, *, server: Server = _LOCAL, settings: Layer) -> int:
    """End a pause of a model."""
    _ask(server, settings, "Resume", model=model)
    print(f"{model} takes new requests")
    return 0


@takes_settings("client")
def add_adapter(
    name: Annotated[str, Parameter(help="the name that requests give as their model")],
    path: Annotated[Path, Parameter(help="adapter folder in PEFT's format; routers and replicas read it")],
    /,
    *,
    model: Annotated[str, Parameter(help="the base model, if several models are served")] = "",
    replace: Annotated[bool, Parameter(help="replace another adapter of this name", negative=())] = False,
    pin: Annotated[
        bool, Parameter(help="keep it in each replica's memory, without requests as well", negative=())
    ] = False,
    server: Server = _LOCAL,
    settings: Layer,
) -> int:
    """Serve a LoRA adapter beside its model. It is refused by name if anything of it cannot be applied."""
    folder = str(path.expanduser().absolute())
    loaded = _ask(server, settings, "LoadAdapter", name=name, path=folder, model=model, replace=replace, pinned=pin)
    print(f"{name} is served  digest={loaded.digest}{'  pinned' if pin else ''}")
    return 0


@takes_settings("client")
def remove_adapter(
    name: Annotated[str, Parameter(help="the adapter's name")], /, *, server: Server = _LOCAL, settings: Layer
) -> int:
    """Remove a LoRA adapter. Requests that run keep it."""
    _ask(server, settings, "UnloadAdapter", name=name)
    print(f"{name} is no longer served")
    return 0


@takes_settings("client")
def pins(*, server: Server = _LOCAL, settings: Layer) -> int:
    """List the prefixes that replicas keep in memory, or on a disk alone, because requests asked for it.

    Exit code 1: a replica has not answered.
    """
    from rich.console import Console
    from rich.table import Table

    found = _ask(server, settings, "ListPins")
    table = Table("tenant", "model", "replica", "prefix", "in", box=None, pad_edge=False)
    for column in ("tokens", "seconds left"):
        table.add_column(column, justify="right")
    for pin in sorted(found.pins, key=lambda one: (one.tenant, one.model, one.replica_id, -one.seconds_left)):
        tenant, tokens, seconds = pin.tenant or "-", str(pin.num_tokens), f"{pin.seconds_left:.0f}"
        where = "disk" if pin.is_on_disk else "memory"
        table.add_row(tenant, pin.model, pin.replica_id, pin.prefix, where, tokens, seconds)
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    console.print(table if found.pins else "no prefix is pinned")
    return _tell_unheard(found.unheard)


@takes_settings("client")
def unpin(
    tenant: Annotated[str, Parameter(help="the tenant's name; '' for requests without one")],
    /,
    *,
    prefix: Annotated[str, Parameter(help="only this prefix, as `holdfast pins` shows it")] = "",
    server: Server = _LOCAL,
    settings: Layer,
) -> int:
    """End a tenant's pins before their time is up, in memory and on the disk. Later requests may pin again.

    Exit code 1: a replica has not answered, and keeps its pins.
    """
    ended = _ask(server, settings, "Unpin", tenant=tenant, prefix=prefix)
    print(f"{ended.num_blocks} blocks in memory are no longer pinned")
    return _tell_unheard(ended.unheard)


def _tell_unheard(replicas: Sequence[Any]) -> int:
    """The exit code."""
    for one in replicas:
        print(f"holdfast: {one.reason}", file=sys.stderr)
    return 1 if replicas else 0


@takes_settings("client")
def log_level(
    level: Annotated[str, Parameter(help="DEBUG, INFO, WARNING or ERROR")],
    /,
    *,
    server: Server = _LOCAL,
    settings: Layer,
) -> int:
    """Change the log level of a cluster's routers and replicas."""
    _ask(server, settings, "SetLogLevel", level=level)
    print(f"log level of routers and replicas: {level.upper()}")
    return 0


@takes_settings("client")
def dump(
    *,
    output: Annotated[Path | None, Parameter(help="output file; default: standard output")] = None,
    server: Annotated[str, Parameter(help="host:port of routers, separated by commas")] = _LOCAL,
    settings: Layer,
) -> int:
    """Write what routers know, for a bug report: replicas, queues, versions, settings, recent errors; no secrets."""
    parts = [f'"{one}": {_ask(one, settings, "DumpState").json}' for one in server.split(",")]
    text = "{" + ",\n".join(parts) + "}\n"
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)
        print(f"written: {output}")
    return 0


def drain_node(*, notice_s: Seconds = 30.0, limit_s: Seconds = 600.0) -> int:
    """Drain the Ray node on this machine: end its routers and replicas gracefully, before the machine or pod goes away.

    Parameters
    ----------
    notice_s
        Seconds that Ray Serve has to start replacements on other nodes; then the processes here get SIGTERM.
    limit_s
        Timeout of the whole drain in seconds; longer than cluster.drain_timeout_s. The head waits for all other nodes.
    """
    from holdfast.cluster.serve.node_drain import drain_this_node

    if drain_this_node(notice_s, limit_s):
        return 0
    print(f"holdfast: routers or replicas still run on this node after {limit_s:g} s (--limit-s)")
    return 1


def _ask(server: str, settings: Layer, method: str, **fields: object) -> Any:
    from holdfast.cluster.client.transport import call_admin
    from holdfast.cluster.config.config import load_config

    return call_admin(server, method, fields, **load_config(settings).config.client.options)
