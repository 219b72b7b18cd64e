"""Operator state of a cluster: drains, pauses, canaries and log level, as plain data, the same in every router."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.log_level import LogLevel, log_level


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """One version of a model that gets a share of its new requests; the others get the rest."""

    model: str
    version: str
    share: float
    """Share in 0..1."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidRequestError("canary.share", self.share, "must be in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause of a model: new requests wait, or are refused; running ones continue."""

    model: str
    refuses: bool = False
    """They are refused instead of waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapter:
    """An adapter that operators have loaded under a name, or a name that they have unloaded."""

    model: str
    name: str
    adapter: Adapter | None
    """None: the name means nothing, also where the model's replicas were started with such an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorState:
    """Settings by the operators of a cluster, at one revision."""

    revision: int = 0
    """Grows with every change. Of two, the one with the greater revision holds."""
    drained: frozenset[str] = frozenset()
    """Ids of replicas that get no new requests; their running requests move, or finish."""
    pauses: tuple[Pause, ...] = ()
    canaries: tuple[Canary, ...] = ()
    """One for a model at most."""
    retired: frozenset[tuple[str, str]] = frozenset()
    """Models and versions that will not be served again: requests that are bound to one without a replica end."""
    held: frozenset[str] = frozenset()
    """Applications whose replicas get nothing yet: they have just come, and are looked at first."""
    adapters: tuple[NamedAdapter, ...] = ()
    """One for a name at most."""
    log_level: LogLevel | None = None
    """None: as routers and replicas were started."""

    def canary_of(self, model: str) -> Canary | None:
        return next((canary for canary in self.canaries if canary.model == model), None)

    def with_drained(self, replica_id: str, is_drained: bool) -> "OperatorState":
        drained = self.drained | {replica_id} if is_drained else self.drained - {replica_id}
        return self._next(drained=drained)

    def with_pause(self, model: str, pause: Pause | None) -> "OperatorState":
        """Replaces the model's pause; None ends it."""
        others = tuple(one for one in self.pauses if one.model != model)
        return self._next(pauses=others if pause is None else (*others, pause))

    def with_canary(self, model: str, canary: Canary | None) -> "OperatorState":
        """Instead of the model's canary that there was; None: its versions are equal."""
        others = tuple(one for one in self.canaries if one.model != model)
        return self._next(canaries=others if canary is None else (*others, canary))

    def with_retired(self, model: str, version: str, is_retired: bool) -> "OperatorState":
        one = (model, version)
        return self._next(retired=self.retired | {one} if is_retired else self.retired - {one})

    def with_held(self, application: str, is_held: bool) -> "OperatorState":
        return self._next(held=self.held | {application} if is_held else self.held - {application})

    def with_adapter(
        self,
        model: str,
        name: str,
        adapter: Adapter | None,
        started_with: Iterable[Adapter] = (),
        max_loras: int | None = None,
    ) -> "OperatorState":
        """Replaces the earlier adapter of that name; None: it means nothing from now on. `started_with`: as for
        `adapters_of`; `max_loras`: slots of a replica, None: unknown. Raises `InvalidRequestError` where pinned
        adapters would take them all.
        """
        others = tuple(one for one in self.adapters if one.name != name)
        changed = self._next(adapters=(*others, NamedAdapter(model=model, name=name, adapter=adapter)))
        if adapter is not None and adapter.pinned and max_loras is not None:
            _check_pins([one.name for one in changed.adapters_of(model, started_with) if one.pinned], max_loras)
        return changed

    def adapters_of(self, model: str, started_with: Iterable[Adapter]) -> list[Adapter]:
        """Adapters of a model by name: the ones that its replicas were started with, as changed by operators."""
        found = {one.name: one for one in started_with} | {
            one.name: one.adapter for one in self.adapters if one.model == model and one.adapter is not None
        }
        gone = {one.name for one in self.adapters if one.adapter is None or one.model != model}
        return [adapter for name, adapter in sorted(found.items()) if name not in gone]

    def with_log_level(self, level: str) -> "OperatorState":
        """Raises `InvalidRequestError` for a level that there is not."""
        return self._next(log_level=log_level(level))

    def _next(self, **changes: object) -> "OperatorState":
        return replace(self, revision=self.revision + 1, **changes)  # type: ignore[arg-type]  # by name, above


def _check_pins(pinned: Sequence[str], max_loras: int) -> None:
    if len(pinned) >= max_loras:
        limit = f"would take the last slot of a replica: {', '.join(pinned)} of model.max_loras = {max_loras}; "
        raise InvalidRequestError("pinned", True, limit + "one must stay for adapters that are not pinned")


NO_OPERATOR_STATE: Final = OperatorState()

_CHANGES: Final = (
    *("with_drained", "with_pause", "with_canary", "with_retired", "with_held", "with_adapter", "with_log_level"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One change of operator state, as it is sent: the name of a method of `OperatorState`, and its arguments."""

    name: str
    arguments: tuple[object, ...]

    def applied_to(self, operator_state: OperatorState) -> OperatorState:
        """The operator state after the change. Raises `InvalidRequestError`."""
        if self.name not in _CHANGES:
            raise InvalidRequestError("change", self.name, f"must be one of {', '.join(_CHANGES)}")
        changed: OperatorState = getattr(operator_state, self.name)(*self.arguments)
        return changed
