"""Difference between what a cluster serves, and by which routers, and a configuration, as steps. Plain data, no Ray.

What may live here: what differs, and in which order it is done. What may not: doing it (`cluster/commands/apply.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.told_settings import ORDER

_CHOSEN_AT_START: Final = "parallel.num_threads"
"""Where it is left open, a cluster on one machine chooses it: that is no difference."""


ROUTERS: Final = "routers"
"""What a step on them says in place of a model."""

_CLUSTERS: Final = ("routers", "drain_timeout_s", "router_resources", "router_labels")
"""Settings of the cluster that routers may be given anew."""

_FIXED: Final = ("host", "port", "http_port", "admin_port")
"""Those that clients know routers by."""


class Kind(StrEnum):
    """What is done to a model or the routers, in the order in which it is done: nothing goes before what takes its
    place is there.
    """

    ADD = "add"
    UPDATE = "update"
    SCALE = "scale"
    REPLACE = "replace"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A model that is served."""

    settings: Mapping[str, Any]
    """As it says them (`told_settings.of_replica`): nested mappings of plain values."""
    num_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One setting."""

    name: str
    before: object
    after: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model, or the routers, and what is to be done."""

    kind: Kind
    model: str
    changes: tuple[Changed, ...] = ()
    config: HoldfastConfig | None = None
    """Its settings afterwards; None where it is removed."""


def difference(running: Mapping[str, Running], wanted: HoldfastConfig) -> list[Step]:
    """What makes the models that run those of `wanted`, whose files have been read (`with_template_texts`)."""
    by_name = {one.model.name: one for one in wanted.each_model}
    steps = [_step_of(running.get(name), name, config) for name, config in by_name.items()]
    steps += [_removal(name, one) for name, one in running.items() if name not in by_name]
    return in_order(step for step in steps if step is not None)


def in_order(steps: Iterable[Step]) -> list[Step]:
    order = list(Kind)
    return sorted(steps, key=lambda step: order.index(step.kind))


def router_difference(
    before: HoldfastConfig, wanted: HoldfastConfig, is_given: Callable[[str], bool]
) -> tuple[list[Step], Sequence[Changed]]:
    """What makes the routers that run with `before` those of `wanted`; and what of `wanted` needs a restart.

    `is_given` says of a setting whether the configuration names it: of the cluster's own, only such count.
    """
    now, then = (_of_routers(one) for one in (before, wanted))
    found = changed_settings(now, then)
    changes = [change for change in found if not change.name.startswith("cluster.") or is_given(change.name)]
    fixed = changed_settings(_at_start(before), _at_start(wanted))
    if not changes:
        return [], [change for change in fixed if is_given(change.name)]
    tree = before.model_dump()
    for change in changes:
        section, _, key = change.name.partition(".")
        tree[section][key] = getattr(getattr(wanted, section), key)
    step = Step(kind=Kind.REPLACE, model=ROUTERS, changes=tuple(changes), config=HoldfastConfig.model_validate(tree))
    return [step], [change for change in fixed if is_given(change.name)]


def _of_routers(config: HoldfastConfig) -> Mapping[str, Any]:
    tree = config.model_dump(mode="json", include={"router", "limits", "telemetry"})
    tree["scheduler"] = config.scheduler.model_dump(mode="json", include=set(ORDER))
    tree["cluster"] = config.cluster.model_dump(mode="json", include=set(_CLUSTERS))
    return tree


def _at_start(config: HoldfastConfig) -> Mapping[str, Any]:
    return {
        "cluster": config.cluster.model_dump(mode="json", include=set(_FIXED)),
        "security": config.security.model_dump(mode="json"),
    }


def _step_of(before: Running | None, name: str, config: HoldfastConfig) -> Step | None:
    if before is None:
        added = Changed(name="cluster.replicas", before=None, after=config.cluster.replicas)
        folder = Changed(name="model.model", before=None, after=config.model.model)
        return Step(kind=Kind.ADD, model=name, changes=(folder, added), config=config)
    changes = changed_settings(before.settings, _compared(config))
    count = Changed(name="cluster.replicas", before=before.num_replicas, after=config.cluster.replicas)
    is_scaled = count.before != count.after and not config.scaling.is_on  # else the load decides
    if changes:
        return Step(kind=Kind.UPDATE, model=name, changes=(*changes, *([count] * is_scaled)), config=config)
    return Step(kind=Kind.SCALE, model=name, changes=(count,), config=config) if is_scaled else None


def _compared(config: HoldfastConfig) -> Mapping[str, Any]:
    return config.worker.model_dump(mode="json") | {"scaling": config.scaling.model_dump(mode="json")}


def _removal(name: str, before: Running) -> Step:
    gone = Changed(name="cluster.replicas", before=before.num_replicas, after=None)
    return Step(kind=Kind.REMOVE, model=name, changes=(gone,))


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Changed]:
    """The settings of two trees that differ, in the order of the second."""
    found = []
    for section, values in after.items():
        if section not in before:  # an older release does not tell it
            continue
        for key, value in values.items():
            path, old = f"{section}.{key}", before.get(section, {}).get(key)
            if old != value and not (path == _CHOSEN_AT_START and value is None):
                found.append(Changed(name=path, before=old, after=value))
    return found
