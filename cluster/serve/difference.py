"""Difference between the models that a cluster serves and those of a configuration, as steps. Plain data, no Ray.

What may live here: what differs, and in which order it is done. What may not: doing it (`cluster/commands/apply.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from holdfast.cluster.config.config import HoldfastConfig

_CHOSEN_AT_START: Final = "parallel.num_threads"
"""Where it is left open, a cluster on one machine chooses it: that is no difference."""


class Kind(StrEnum):
    """What is done to a model, in the order in which it is done: nothing goes before what takes its place is there."""

    ADD = "add"
    UPDATE = "update"
    SCALE = "scale"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A model that is served."""

    settings: Mapping[str, Any]
    """Its `WorkerConfig`, as nested mappings of plain values."""
    num_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One setting."""

    name: str
    before: object
    after: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model, and what is to be done to it."""

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
    order = list(Kind)
    return sorted((step for step in steps if step is not None), key=lambda step: order.index(step.kind))


def _step_of(before: Running | None, name: str, config: HoldfastConfig) -> Step | None:
    if before is None:
        added = Changed(name="cluster.replicas", before=None, after=config.cluster.replicas)
        folder = Changed(name="model.model", before=None, after=config.model.model)
        return Step(kind=Kind.ADD, model=name, changes=(folder, added), config=config)
    changes = changed_settings(before.settings, config.worker.model_dump(mode="json"))
    count = Changed(name="cluster.replicas", before=before.num_replicas, after=config.cluster.replicas)
    is_scaled = count.before != count.after and not config.scaling.is_on  # else the load decides
    if changes:
        return Step(kind=Kind.UPDATE, model=name, changes=(*changes, *([count] * is_scaled)), config=config)
    return Step(kind=Kind.SCALE, model=name, changes=(count,), config=config) if is_scaled else None


def _removal(name: str, before: Running) -> Step:
    gone = Changed(name="cluster.replicas", before=before.num_replicas, after=None)
    return Step(kind=Kind.REMOVE, model=name, changes=(gone,))


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Changed]:
    """The settings of two trees that differ, in the order of the second."""
    found = []
    for section, values in after.items():
        for key, value in values.items():
            path, old = f"{section}.{key}", before.get(section, {}).get(key)
            if old != value and not (path == _CHOSEN_AT_START and value is None):
                found.append(Changed(name=path, before=old, after=value))
    return found
