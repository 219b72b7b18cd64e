"""Commands `holdfast models update` and `rollback`: another version of a model that a cluster serves."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from holdfast.cluster.commands.models import NOT_WHICH, OF_REPLICA, OF_ROUTERS, Pid, connected
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.cluster.progress_bars import progress
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig, LoadedConfig


_CANARY = "how much of the new requests a canary gets, in (0, 1]; default: no canary"


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
    pid: Pid = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Replace a model of a running cluster by another version, replica by replica, without ending a stream.

    What is given here changes, all else is as the model runs now. Streams that have begun end on the old version; what
    has not ended drain_timeout_s after its last replica began to drain is told so.
    """
    from holdfast.cluster.config.config import is_given, load_config
    from holdfast.cluster.serve.canary import read_known_answers

    if not 0 <= canary <= 1:
        raise ConfigurationError(f"--canary = {canary}: must be in [0, 1]")
    answers = [] if known_answers is None else read_known_answers(known_answers)
    if answers and not canary:
        raise ConfigurationError("--known-answers needs --canary: they are asked of a canary alone")
    loaded = load_config({**settings, "model.served_model_name": Setting(name, "NAME")}, config)
    with connected(loaded.config, pid), progress(sys.stderr) as report:
        from holdfast.cluster.serve.serving import update_model
        from holdfast.cluster.serve.updates import UpdatePlan

        plan = UpdatePlan(
            model=name,
            num_replicas=loaded.config.cluster.replicas if is_given(loaded, "cluster.replicas") else None,
            share=canary,
            watch_s=canary_for,
            min_requests=min_requests,
        )
        wanted = _over(running_settings(loaded.config.cluster.namespace, name), loaded)
        updated = update_model(wanted, plan, report, answers)
    print(f"{name}: version {updated.new_version} serves with {updated.num_replicas} replicas; it was", end=" ")
    print(f"{updated.old_version}" if updated.old_version != updated.new_version else "the same before")
    return 0


@takes_settings("cluster", without=NOT_WHICH)
def rollback(
    name: Annotated[str, Parameter(help="the model's name in the API")], /, *, pid: Pid = None, settings: Layer
) -> int:
    """Take back an update that was cut off: the model's older version serves alone again."""
    from holdfast.cluster.config.config import load_config

    loaded = load_config(settings).config
    with connected(loaded, pid):
        from holdfast.cluster.serve.serving import rollback_model

        taken = rollback_model(loaded.cluster.namespace, name, loaded.cluster.drain_timeout_s)
    print(f"taken back: {', '.join(taken)}" if taken else f"{name}: there is nothing to take back")
    return 0


def running_settings(namespace: str, name: str) -> Mapping[str, Any]:
    """The settings of a replica that serves the model, as nested mappings. Raises `UnknownModelError`."""
    from holdfast.cluster.serve import models
    from holdfast.worker.errors import UnknownModelError

    found = models.settings_of(namespace)
    if name not in found:
        raise UnknownModelError(name, tuple(found))
    settings: Mapping[str, Any] = json.loads(found[name])
    return settings


def _over(running: Mapping[str, Any], loaded: "LoadedConfig") -> "HoldfastConfig":
    """What is given, over how the model runs."""
    from holdfast.cluster.config.config import HoldfastConfig, is_given

    tree = loaded.config.model_dump()
    for section, values in running.items():
        given = {key: value for key, value in tree[section].items() if is_given(loaded, f"{section}.{key}")}
        tree[section] = {**tree[section], **values, **given}
    return HoldfastConfig.model_validate(tree)
