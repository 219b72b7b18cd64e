"""Commands `holdfast models update` and `rollback`: another version of a model that a cluster serves."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.cluster.commands.models import NOT_WHICH, OF_REPLICA, OF_ROUTERS, Pid, Server, connected, given_drain
from holdfast.cluster.commands.remote_models import change_model, check_remote, given_settings
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.cluster.progress_bars import progress
from holdfast.worker.errors import ConfigurationError

_CANARY = "share of new requests that a canary gets, in (0, 1]; default: no canary"


@takes_settings(
    *OF_REPLICA, "cluster", "client", without=("model.served_model_name", *(f"cluster.{name}" for name in OF_ROUTERS))
)
def update(
    name: Annotated[str, Parameter(help="the model's name in the API")],
    /,
    *,
    canary: Annotated[float, Parameter(help=_CANARY)] = 0.0,
    canary_for: Annotated[float, Parameter(help="seconds that a canary is watched")] = 60.0,
    min_requests: Annotated[int, Parameter(help="requests that a canary must have ended before it is trusted")] = 20,
    known_answers: Annotated[Path | None, Parameter(help="JSON: prompts, and how the canary must answer them")] = None,
    server: Server = None,
    pid: Pid = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Replace a model of a running cluster by another version, replica by replica, without ending a stream."""
    from holdfast.cluster.config.config import is_given, load_config
    from holdfast.cluster.serve.canary import read_known_answers

    if not 0 <= canary <= 1:
        raise ConfigurationError(f"--canary = {canary}: must be in [0, 1]")
    answers = [] if known_answers is None else read_known_answers(known_answers)
    if answers and not canary:
        raise ConfigurationError("--known-answers needs --canary: only a canary is checked against known answers")
    loaded = load_config({**settings, "model.served_model_name": Setting(name, "NAME")}, config)
    if server is not None:
        check_remote(settings, pid=pid)
        if answers:
            raise ConfigurationError(
                "--known-answers (with --server): known answers are requests with this machine's key, which a router "
                "must not use: run the update on the cluster's machine"
            )
        change = {
            "model": name,
            "settings": given_settings(loaded, (*OF_REPLICA, "cluster")),
            "canary_share": canary,
            "canary_seconds": canary_for,
            "min_requests": min_requests,
        }
        return _say_updated(name, change_model(server, loaded, update=change))
    with connected(loaded.config, pid), progress(sys.stderr) as report:
        from holdfast.cluster.serve.models import over_running, running_settings
        from holdfast.cluster.serve.serving import update_model
        from holdfast.cluster.serve.updates import UpdatePlan

        plan = UpdatePlan(
            model=name,
            num_replicas=loaded.config.cluster.replicas if is_given(loaded, "cluster.replicas") else None,
            share=canary,
            watch_s=canary_for,
            min_requests=min_requests,
        )
        wanted = over_running(running_settings(loaded.config.cluster.namespace, name), loaded)
        updated = update_model(wanted, plan, report, answers)
    return _say_updated(name, updated)


def _say_updated(name: str, updated: Any) -> int:
    """`updated` is an `Updated`, or a message with its fields."""
    print(f"{name}: version {updated.new_version} serves with {updated.num_replicas} replicas; it was", end=" ")
    print(f"{updated.old_version}" if updated.old_version != updated.new_version else "the same before")
    return 0


@takes_settings("cluster", "client", without=NOT_WHICH)
def rollback(
    name: Annotated[str, Parameter(help="the model's name in the API")],
    /,
    *,
    server: Server = None,
    pid: Pid = None,
    settings: Layer,
) -> int:
    """Undo an update that was interrupted: the model's older version serves alone again."""
    from holdfast.cluster.config.config import load_config

    loaded = load_config(settings)
    if server is not None:
        check_remote(settings, pid=pid)
        changed = change_model(server, loaded, rollback={"model": name, **given_drain(loaded)})
        removed = list(changed.removed_applications)
    else:
        with connected(loaded.config, pid):
            from holdfast.cluster.serve.serving import rollback_model

            cluster = loaded.config.cluster
            removed = rollback_model(cluster.namespace, name, cluster.drain_timeout_s)
    print(f"rolled back: {', '.join(removed)}" if removed else f"{name}: no interrupted update to roll back")
    return 0
