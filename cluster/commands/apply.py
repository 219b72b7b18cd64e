"""Command `holdfast apply`: makes the models and routers of a running cluster those of a configuration."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from holdfast.cluster.commands.models import (
    LAYOUT_SETTINGS,
    MODEL_SECTIONS,
    Pid,
    Server,
    change_model,
    check_remote,
    connected,
    list_models,
    settings_text,
)
from holdfast.cluster.config.flags import takes_settings
from holdfast.cluster.config.layers import Layer
from holdfast.cluster.progress_bars import progress
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.progress import Report

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig, LoadedConfig
    from holdfast.cluster.serve.canary import Changed, PlannedChange, Running


@takes_settings("cluster", "client", without=LAYOUT_SETTINGS)
def apply(
    config: Annotated[Path, Parameter(help="a .yaml or .toml file of settings")],
    /,
    *,
    yes: Annotated[bool, Parameter(help="apply the changes without confirmation", negative=())] = False,
    dry_run: Annotated[bool, Parameter(help="only show the differences", negative=())] = False,
    server: Server = None,
    pid: Pid = None,
    settings: Layer,
) -> int:
    """Show how the models and routers of a running cluster differ from CONFIG, ask, and change them."""
    from holdfast.cluster.config.chat_templates import with_template_texts
    from holdfast.cluster.config.config import is_given, load_config
    from holdfast.cluster.serve.canary import difference, in_order, router_difference

    loaded = load_config(settings, config)
    wanted = with_template_texts(loaded.config)
    if server is not None:
        check_remote(settings, pid=pid)
        steps = difference(_running_at(server, loaded), wanted)
        return _apply(steps, lambda step, _: _do_at(server, loaded, step), yes=yes, dry_run=dry_run)
    with connected(wanted, pid):
        from holdfast.cluster.serve.router_update import running_routers
        from holdfast.cluster.serve.serving import running_models

        steps = difference(running_models(wanted.cluster.namespace), wanted)
        routers = running_routers(wanted.cluster.namespace)
        if routers is not None:
            of_routers, fixed = router_difference(routers, wanted, lambda path: is_given(loaded, path))
            steps = in_order([*steps, *of_routers])
            _warn_of(fixed)
        return _apply(steps, lambda step, report: _do(step, wanted, routers, report), yes=yes, dry_run=dry_run)


def _apply(
    steps: "Sequence[PlannedChange]", do: "Callable[[PlannedChange, Report], None]", *, yes: bool, dry_run: bool
) -> int:
    """Shows the steps, asks, and takes them. Returns the exit code."""
    if not steps:
        print("nothing differs")
        return 0
    _show(steps)
    if dry_run:
        return 0
    if not yes and not _agrees():
        print("nothing was changed")
        return 1
    with progress(sys.stderr) as report:
        for step in steps:
            do(step, report)
    print(f"done: {', '.join(f'{step.kind} {step.model}' for step in steps)}")
    return 0


def _running_at(server: str, loaded: "LoadedConfig") -> "dict[str, Running]":
    """The models that the cluster of a router serves. Raises `HoldfastError`."""
    from holdfast.cluster.serve.canary import Running

    return {
        one.name: Running(settings=json.loads(one.settings), num_replicas=one.num_replicas)
        for one in list_models(server, loaded)
        if one.settings
    }


def _do_at(server: str, loaded: "LoadedConfig", step: "PlannedChange") -> None:
    """Has a router take a step. Raises `HoldfastError`."""
    from holdfast.cluster.serve.canary import ChangeKind

    config = step.config
    if step.kind is ChangeKind.REMOVE or config is None:
        timeout_s = loaded.config.cluster.drain_timeout_s
        change_model(server, loaded, remove={"model": step.model, "drain_timeout_seconds": timeout_s})
        return
    settings = settings_text(config, (*MODEL_SECTIONS, "cluster"))
    if step.kind is ChangeKind.ADD:
        change_model(server, loaded, add={"settings": settings})
    elif step.kind is ChangeKind.UPDATE:
        change_model(server, loaded, update={"model": step.model, "settings": settings})
    else:
        change_model(server, loaded, scale={"model": step.model, "num_replicas": config.cluster.replicas})


def _warn_of(fixed: "Sequence[Changed]") -> None:
    for change in fixed:
        now, then = _said(change.before) or "none", _said(change.after) or "none"
        print(f"{change.name}: {now} now, {then} there: it needs a restart, and stays", file=sys.stderr)


def _show(steps: "Sequence[PlannedChange]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", "setting", "now", "then", box=None, pad_edge=False)
    for step in steps:
        for number, change in enumerate(step.changes):
            head = ("", "") if number else (step.model, str(step.kind))
            table.add_row(*head, change.name, _said(change.before), _said(change.after))
    Console().print(table)


def _said(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _agrees() -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError("--yes is required: there is no terminal on which to confirm")
    return input("do it? [y/N] ").strip().lower() in ("y", "yes")


def _do(step: "PlannedChange", wanted: "HoldfastConfig", routers: "HoldfastConfig | None", report: Report) -> None:
    """Returns once it serves. Raises what says that it does not."""
    from holdfast.cluster.serve import models, serving
    from holdfast.cluster.serve.canary import ChangeKind
    from holdfast.cluster.serve.router_update import replace_routers
    from holdfast.cluster.serve.updates import UpdatePlan

    namespace, config = wanted.cluster.namespace, step.config
    if step.kind is ChangeKind.REMOVE or config is None:
        models.remove(namespace, step.model, wanted.cluster.drain_timeout_s)
    elif step.kind is ChangeKind.REPLACE:
        assert routers is not None, "they differ from something"
        replace_routers(routers, config, report)
    elif step.kind is ChangeKind.ADD:
        serving.add_model(config, report)
    elif step.kind is ChangeKind.UPDATE:
        serving.update_model(config, UpdatePlan(model=step.model, num_replicas=config.cluster.replicas), report)
    else:
        serving.scale_model(config, report)
