"""Canary: whether a new version of a model is worse than the current one, by the routers' counts.

`verdict` is a pure function of counts.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.router_update import ORDER
from holdfast.router.dispatch.versions import VersionCounts
from holdfast.worker.errors import ConfigurationError

CHANCE: Final = 0.01
"""A canary is taken back for failures if one as good as the others would fail so often with a smaller chance."""

ALWAYS_SOME: Final = 0.005
"""The share of requests that may fail of any version: of zero failures nothing can be said with certainty."""

MIN_FAILED: Final = 2
"""Fewest failures that count as evidence."""

MAX_LOST: Final = 1
"""Replicas of a canary that may be lost: one may be chance."""

SLOWER: Final = 2.0
"""Ratio of mean times to the first token above which a canary is rolled back."""

MIN_FIRST_TOKENS: Final = 20
"""First tokens needed from each version before their times are compared."""


class KnownAnswer(BaseModel):
    """A prompt and how the answer to it must begin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(min_length=1)
    starts_with: str = Field(min_length=1)
    num_tokens: int = Field(16, ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations of a canary and of the versions that it is compared with."""

    canary: VersionCounts
    others: VersionCounts
    wrong_answers: Sequence[str] = ()
    """Wrong answers, each in a few words."""


def verdict(seen: Observed) -> str | None:
    """Why the canary must be taken back; None: nothing speaks against it."""
    canary, others = seen.canary, seen.others
    if seen.wrong_answers:
        return f"{len(seen.wrong_answers)} wrong answers: {'; '.join(seen.wrong_answers[:3])}"
    if canary.num_lost > max(MAX_LOST, others.num_lost):
        return f"{canary.num_lost} of its replicas were lost, and {others.num_lost} of the others"
    if _is_worse(canary, others):
        return f"{_failures(canary)} failed, and {_failures(others)} of the others"
    if min(canary.num_first_tokens, others.num_first_tokens) >= MIN_FIRST_TOKENS:
        own_s, their_s = (one.first_token_s / one.num_first_tokens for one in (canary, others))
        if own_s > SLOWER * their_s:
            return f"its first tokens took {own_s:.3f} s on average, and {their_s:.3f} s those of the others"
    return None


def _is_worse(canary: VersionCounts, others: VersionCounts) -> bool:
    if canary.num_failed < MIN_FAILED:
        return False
    expected = max(ALWAYS_SOME, others.num_failed / max(1, _num_ended(others)))
    return chance_of_at_least(canary.num_failed, _num_ended(canary), min(1.0, expected)) < CHANCE


def chance_of_at_least(num_failed: int, number: int, share: float) -> float:
    """Probability of at least `num_failed` failures among `number` independent requests, each of which fails with
    probability `share`.
    """
    if not 0 < share < 1:
        return 1.0 if share >= 1 or num_failed == 0 else 0.0
    below = (
        math.exp(_log_ways(number, k) + k * math.log(share) + (number - k) * math.log1p(-share))
        for k in range(min(num_failed, number + 1))
    )
    return max(0.0, 1.0 - math.fsum(below))


def _log_ways(number: int, k: int) -> float:
    return math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)


def _num_ended(counts: VersionCounts) -> int:
    return counts.num_finished + counts.num_failed


def _failures(counts: VersionCounts) -> str:
    return f"{counts.num_failed} of {_num_ended(counts)} requests"


def summed(model: str, version: str, counts: Iterable[VersionCounts]) -> VersionCounts:
    """Counts of one version, summed over all routers."""
    total = VersionCounts(model=model, version=version)
    for one in counts:
        if (one.model, one.version) == (model, version):
            total = total.plus(one)
    return total


def since(now: VersionCounts, before: VersionCounts) -> VersionCounts:
    """Counts made since `before`; a router that was replaced starts from zero, so no difference is negative."""
    return replace(
        now,
        num_finished=max(0, now.num_finished - before.num_finished),
        num_failed=max(0, now.num_failed - before.num_failed),
        num_lost=max(0, now.num_lost - before.num_lost),
        num_first_tokens=max(0, now.num_first_tokens - before.num_first_tokens),
        first_token_s=max(0.0, now.first_token_s - before.first_token_s),
    )


def read_known_answers(path: Path) -> list[KnownAnswer]:
    """A JSON file: a list of objects with `prompt`, `starts_with` and, if wanted, `num_tokens`.

    Raises `ConfigurationError`.
    """
    try:
        found = TypeAdapter(list[KnownAnswer]).validate_python(json.loads(path.read_text()))
    except (OSError, ValueError, ValidationError) as error:
        message = " ".join(str(error).split())
        raise ConfigurationError(f"--known-answers {path}: {message}") from None
    if not found:
        raise ConfigurationError(f"--known-answers {path}: must have one at least")
    return found


_CHOSEN_AT_START: Final = "parallel.num_threads"
"""Setting that a cluster on one machine chooses if it is left open: a difference there is none."""


ROUTERS: Final = "routers"
"""Name of the routers in a step, in place of a model's."""

_CLUSTERS: Final = ("routers", "drain_timeout_s", "router_resources", "router_labels")
"""Settings of the cluster that a replacement of its routers may change."""

_FIXED: Final = ("host", "port", "http_port", "admin_port")
"""Addresses by which clients know routers."""


class ChangeKind(StrEnum):
    """Kinds of change to models and routers, in order of execution: nothing is removed before its replacement
    serves.
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
    """Settings as the member reports them (`told_settings.of_replica`): nested mappings of plain values."""
    num_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One setting."""

    name: str
    before: object
    after: object


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """One model, or the routers, and the change to make."""

    kind: ChangeKind
    model: str
    changes: tuple[Changed, ...] = ()
    config: HoldfastConfig | None = None
    """Settings after the change; None if the model is removed."""


def difference(running: Mapping[str, Running], wanted: HoldfastConfig) -> list[PlannedChange]:
    """Changes that turn the running models into those of `wanted`, whose files have been read
    (`with_template_texts`).
    """
    by_name = {one.model.name: one for one in wanted.each_model}
    steps = [_step_of(running.get(name), name, config) for name, config in by_name.items()]
    steps += [_removal(name, one) for name, one in running.items() if name not in by_name]
    return in_order(step for step in steps if step is not None)


def in_order(steps: Iterable[PlannedChange]) -> list[PlannedChange]:
    """Steps sorted by kind, in the order of `ChangeKind`."""
    order = list(ChangeKind)
    return sorted(steps, key=lambda step: order.index(step.kind))


def router_difference(
    before: HoldfastConfig, wanted: HoldfastConfig, is_given: Callable[[str], bool]
) -> tuple[list[PlannedChange], Sequence[Changed]]:
    """Changes that turn routers started with `before` into those of `wanted`, and the settings of `wanted` that need a
    restart.

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
    step = PlannedChange(
        kind=ChangeKind.REPLACE, model=ROUTERS, changes=tuple(changes), config=HoldfastConfig.model_validate(tree)
    )
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


def _step_of(before: Running | None, name: str, config: HoldfastConfig) -> PlannedChange | None:
    if before is None:
        added = Changed(name="cluster.replicas", before=None, after=config.cluster.replicas)
        folder = Changed(name="model.model", before=None, after=config.model.model)
        return PlannedChange(kind=ChangeKind.ADD, model=name, changes=(folder, added), config=config)
    changes = changed_settings(before.settings, _compared(config))
    count = Changed(name="cluster.replicas", before=before.num_replicas, after=config.cluster.replicas)
    is_scaled = count.before != count.after and not config.scaling.is_on  # else the load decides
    if changes:
        return PlannedChange(
            kind=ChangeKind.UPDATE, model=name, changes=(*changes, *([count] * is_scaled)), config=config
        )
    return PlannedChange(kind=ChangeKind.SCALE, model=name, changes=(count,), config=config) if is_scaled else None


def _compared(config: HoldfastConfig) -> Mapping[str, Any]:
    return config.worker.model_dump(mode="json") | {"scaling": config.scaling.model_dump(mode="json")}


def _removal(name: str, before: Running) -> PlannedChange:
    gone = Changed(name="cluster.replicas", before=before.num_replicas, after=None)
    return PlannedChange(kind=ChangeKind.REMOVE, model=name, changes=(gone,))


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
