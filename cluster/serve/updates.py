"""Rolling update of one model: the new version comes up beside the old one, replica by replica, and takes its place.

Streams that have begun on the old version end there: its replicas drain, and hand over among themselves. A new version
may begin as a canary, and is rolled back where a verdict (`canary.py`) or an error says so.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.cluster.serve.canary import Observed, since, summed, verdict
from holdfast.cluster.serve.directory import Member, Role, Snapshot
from holdfast.router.dispatch.versions import VersionCounts
from holdfast.router.operator_state import Canary, Change
from holdfast.worker.errors import ConfigurationError, HoldfastError, ReplicaError, UpdateRolledBackError
from holdfast.worker.progress import Report

logger = logging.getLogger(__name__)

LINK_S: Final = 10.0
"""Seconds that routers may take to reach a serving replica."""

LOOK_EVERY_S: Final = 2.0

STARTING: Final = "starting the new version"


class Steps(Protocol):
    """Actions of an update on a cluster, and its observations of it."""

    num_audited: int
    """Answers of the canary that were audited; 0 without an audit, and while the canary has no room."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None:
        """Waits `seconds`."""
        ...

    def applications(self) -> Sequence[str]:
        """Applications of the model, the oldest first."""

    def snapshot(self) -> Snapshot:
        """State of the directory now. Raises `ReplicaError` if Serve has given an application up."""

    def order(self, change: Change) -> None:
        """Changes the operator state."""
        ...

    def deploy(self) -> str:
        """Hands the new version to Serve, with one replica. Returns the name of its application."""

    def next_application(self) -> str:
        """Name of the application that `deploy` will make."""

    def scale(self, application: str, num_replicas: int) -> None:
        """Sets the number of replicas of a Serve application."""
        ...

    def delete(self, application: str) -> None:
        """Ends an application, and waits until its replicas have drained."""

    def wrong_answers(self, version: str) -> Sequence[str]:
        """Answers of a version that differ from the known answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """Plan of a model's update."""

    model: str
    num_replicas: int | None = None
    """Replicas of the new version; None: the old version's number."""
    share: float = 0.0
    """Share of new requests for a canary; 0: there is no canary."""
    watch_s: float = 60.0
    """Seconds that the canary is watched."""
    min_requests: int = 20
    """Requests that a canary must have finished before it is trusted; it is watched longer for them, up to four times.
    """
    timeout_s: float = 600.0
    """Seconds that a replica may take to come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """Result of an update."""

    old_version: str
    new_version: str
    num_replicas: int
    num_audited: int = 0
    """Answers of the canary that were audited."""


class Update:
    """One update, from beginning to end. `run` either completes it or leaves the old version as it was."""

    def __init__(self, steps: Steps, plan: UpdatePlan, report: Report) -> None:
        self._steps = steps
        self._plan = plan
        self._report = report
        self._old = ""
        self._num_old = 0
        self._old_version = self._new_version = ""

    def run(self) -> Updated:
        """Raises `ConfigurationError` before anything is changed, `UpdateRolledBackError` if it was rolled back."""
        self._old, self._num_old = self._before()
        new = self._steps.next_application()
        try:
            return self._replace(new)
        except BaseException as error:  # an interrupt as well
            self._take_back(new)
            if isinstance(error, UpdateRolledBackError | ConfigurationError) or not isinstance(error, HoldfastError):
                raise
            raise UpdateRolledBackError(f"{self._plan.model}: the update was rolled back: {error}") from error

    def _before(self) -> tuple[str, int]:
        name, applications = self._plan.model, self._steps.applications()
        if len(applications) != 1:
            way_out = "holdfast models rollback" if applications else "holdfast models add"
            raise ConfigurationError(
                f"model {name!r} has {len(applications)} separate applications, and an update needs one: {way_out}"
            )
        serving = self._serving(self._steps.snapshot(), applications[0])
        if not serving:
            raise ConfigurationError(
                f"model {name!r}: none of its replicas serves, so there is no running version to update"
            )
        return applications[0], len(serving)

    def _replace(self, new: str) -> Updated:
        old_replica = self._serving(self._steps.snapshot(), self._old)[0]
        self._order("with_held", new, True)
        self._steps.deploy()
        first = self._wait_for(new, 1)[0]
        self._report(STARTING, 1, 1)
        self._old_version, self._new_version = old_replica.version, first.version
        _check_tokenizer(old_replica, first)
        self._order("with_retired", self._plan.model, first.version, False)  # it may have served before
        if self._plan.share:
            self._try_canary(old_replica.version, first.version, new)
        else:
            self._order("with_held", new, False)
        wanted = self._plan.num_replicas or self._num_old
        self._roll(new, wanted)
        return Updated(
            old_version=old_replica.version,
            new_version=first.version,
            num_replicas=wanted,
            num_audited=self._steps.num_audited,
        )

    def _roll(self, new: str, wanted: int) -> None:
        """One replica of the new version, then one less of the old one, and so on."""
        for number in range(1, max(wanted, self._num_old) + 1):
            self._report("replacing", number, max(wanted, self._num_old))
            if number <= wanted:
                self._steps.scale(new, number)
                self._wait_for(new, number)
                self._wait_for_links()
            if self._num_old > number:
                self._steps.scale(self._old, self._num_old - number)
        self._order("with_canary", self._plan.model, None)
        if self._old_version != self._new_version:
            self._order("with_retired", self._plan.model, self._old_version, True)
        self._report("draining the old version", 0, 1)
        self._steps.delete(self._old)
        self._report("draining the old version", 1, 1)

    def _try_canary(self, old_version: str, version: str, new: str) -> None:
        """Raises `UpdateRolledBackError` if it is worse than what serves."""
        if old_version == version:
            raise ConfigurationError(
                f"model {self._plan.model!r}: the new version equals the running one: a canary would compare nothing"
            )
        plan, steps = self._plan, self._steps
        before = self._counts(old_version), self._counts(version)
        self._order("with_canary", plan.model, Canary(model=plan.model, version=version, share=plan.share))
        self._order("with_held", new, False)
        self._wait_for_links()
        started_s = steps.now()
        while True:
            wrong_answers = steps.wrong_answers(version)  # first: an audit takes long, and requests end meanwhile
            others, canary = (since(self._counts(one.version), one) for one in before)
            seen = Observed(canary=canary, others=others, wrong_answers=wrong_answers)
            reason = verdict(seen)
            if reason is not None:
                raise UpdateRolledBackError(f"{plan.model}: canary {version} was rolled back: {reason}")
            watched_s, num_ended = steps.now() - started_s, canary.num_finished + canary.num_failed
            self._report(f"canary {version}", round(min(watched_s, plan.watch_s)), round(plan.watch_s))
            if watched_s >= plan.watch_s and num_ended >= plan.min_requests:
                return
            if watched_s >= 4 * plan.watch_s:
                message = (
                    f"only {num_ended} requests ended in {watched_s:.0f} s, and --min-requests is {plan.min_requests}"
                )
                raise UpdateRolledBackError(f"{plan.model}: canary {version} was rolled back: {message}")
            steps.sleep(LOOK_EVERY_S)

    def _take_back(self, new: str) -> None:
        """The old version serves as before; the new one drains. Best effort: errors are logged."""
        model, version = self._plan.model, self._new_version
        undo: list[Callable[[], None]] = [lambda: self._steps.scale(self._old, self._num_old)]
        if version:
            canary = Canary(model=model, version=version, share=0.0)
            undo.append(lambda: self._order("with_canary", model, canary))
            if version != self._old_version:
                undo.append(lambda: self._order("with_retired", model, version, True))
        undo.append(lambda: self._steps.delete(new))
        undo += [lambda: self._order("with_canary", model, None), lambda: self._order("with_held", new, False)]
        for step in undo:
            try:
                step()
            except Exception:  # the steps after it are done all the same
                logger.exception("a step of taking back the update of %s failed", model)

    def _wait_for(self, application: str, number: int) -> list[Member]:
        """Waits until this number of its replicas serve. Raises errors that make waiting useless."""
        end_s = self._steps.now() + self._plan.timeout_s
        while True:
            self._report(STARTING, 0, 1)  # again and again: it may raise, which ends the wait
            snapshot = self._steps.snapshot()
            for member in snapshot.members:
                if member.application == application and member.error is not None:
                    raise ConfigurationError(member.error)
            serving = self._serving(snapshot, application)
            if len(serving) >= number:
                return serving
            if self._steps.now() > end_s:
                doing = ", ".join({one.phase for one in snapshot.members if one.application == application})
                message = f"replica {number} of the new version does not serve after {self._plan.timeout_s:g} s"
                raise ReplicaError(f"{message} ({doing or 'no process has started: is there room for one more?'})")
            self._steps.sleep(0.2)

    def _wait_for_links(self) -> None:
        """Until every router has reached the replicas that serve, for so long at most."""
        end_s = self._steps.now() + LINK_S
        while self._steps.now() < end_s:
            snapshot = self._steps.snapshot()
            replicas = [one for one in snapshot.serving(Role.REPLICA) if one.model == self._plan.model]
            routers = snapshot.serving(Role.ROUTER)
            if all(dict(router.linked).get(self._plan.model, 0) >= len(replicas) for router in routers):
                return
            self._steps.sleep(0.1)

    def _counts(self, version: str) -> VersionCounts:
        routers = self._steps.snapshot().serving(Role.ROUTER)
        return summed(self._plan.model, version, (one for router in routers for one in router.counts))

    def _order(self, name: str, *arguments: object) -> None:
        self._steps.order(Change(name, arguments))

    def _serving(self, snapshot: Snapshot, application: str) -> list[Member]:
        return [one for one in snapshot.serving(Role.REPLICA) if one.application == application]


def _check_tokenizer(old: Member, new: Member) -> None:
    if old.tokenizer_digest != new.tokenizer_digest:
        raise ConfigurationError(
            f"model {new.model!r}: {new.model_path} has another tokenizer than {old.model_path}; all versions of a "
            "model share one, so serve it under another name (holdfast models add)"
        )
