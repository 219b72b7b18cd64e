"""Drain of the Ray node of this process, as a pod does before it ends.

The node is marked as draining in Ray, so that nothing is placed there and Serve starts replacements on other nodes;
then the routers and replicas here end gracefully. The head, which does nothing but control, waits for all other nodes.
Whatever Ray does not answer, the processes themselves get the signal. One Ray node per pod or machine is assumed.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve import models
from holdfast.cluster.serve.canary import KnownAnswer
from holdfast.cluster.serve.directory import Role, Snapshot
from holdfast.cluster.serve.ray_internals import drain_node
from holdfast.router.operator_state import Change
from holdfast.worker.errors import CallerError, ConfigurationError, HoldfastError, ReplicaError
from holdfast.worker.model_info import version_of
from holdfast.worker.replica.processes import ProcessId
from holdfast.worker.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

POLL_S: Final = 0.2
REQUEST_S: Final = 20.0
"""Seconds that Ray may take to answer. Its head may be gone already, if all pods of a cluster end together."""

_HEAD: Final = "node:__internal_head__"
_SERVE_REPLICA: Final = b"ray::ServeReplica:"
_MEMBERS: Final = (b":Router", b":Replica")
"""Process titles of `app.ROUTER` and `app.REPLICA`; a model's name may follow."""


@dataclass(frozen=True, kw_only=True)
class NodeDrain:
    """One drain. Everything outside of it is passed in."""

    announce: Callable[[float], bool]
    """Marks this node in Ray as draining within this number of seconds, and returns whether it is the head."""
    num_other_nodes: Callable[[], int]
    """Number of other live nodes, for the head."""
    members: Callable[[], Sequence[ProcessId]]
    """The routers and leaders that run here."""
    end: Callable[[ProcessId], None]
    """Sends SIGTERM."""
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def run(self, notice_s: float, limit_s: float) -> bool:
        """True once nothing serves here; False if that takes longer than `limit_s`.

        Serve has `notice_s` of it to start replacements and end the processes here; the remaining ones then get
        SIGTERM.
        """
        deadline_s = self.now_s() + limit_s
        try:
            is_head = self.announce(notice_s)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds
            logger.warning("Ray could not be notified that this node drains: %s", error)
            is_head, notice_s = False, 0.0
        if is_head:
            return self._until(lambda: self.num_other_nodes() == 0, deadline_s)
        notice_until_s = min(self.now_s() + notice_s, deadline_s)
        if self._until(lambda: not self.members(), notice_until_s):
            return True
        for process in self.members():
            self.end(process)
        return self._until(lambda: not self.members(), deadline_s)

    def _until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        while not condition():
            if self.now_s() >= deadline_s:
                return False
            self.sleep(POLL_S)
        return True


def drain_this_node(notice_s: float, limit_s: float) -> bool:
    """Drains the Ray node of this pod or machine, as `NodeDrain.run` says. Ray is found as `ray.init` finds it."""
    drain = NodeDrain(announce=_announce, num_other_nodes=_num_other_nodes, members=members_here, end=_end)
    return drain.run(notice_s, limit_s)


def members_here(proc: Path = Path("/proc")) -> list[ProcessId]:
    """The routers and replicas' leaders among the processes of this pod or machine, by their titles."""
    found = []
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
            if title.startswith(_SERVE_REPLICA) and any(name in title for name in _MEMBERS):
                found.append(ProcessId.of(int(path.parent.name)))
        except (OSError, ProcessLookupError):
            continue  # it has ended
    return found


def _end(process: ProcessId) -> None:
    try:
        descriptor = process.open()
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    finally:
        os.close(descriptor)


def _announce(notice_s: float) -> bool:
    """Raises the errors of Ray's calls, and `TimeoutError`."""
    answers: list[bool | Exception] = []

    def ask() -> None:
        try:
            answers.append(_tell_ray(notice_s))
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread that waits raises it
            answers.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(REQUEST_S)
    if not answers:
        raise TimeoutError(f"no answer within {REQUEST_S:g} s")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _tell_ray(notice_s: float) -> bool:
    import ray

    ray.init(address="auto", log_to_driver=False, configure_logging=False)
    context = ray.get_runtime_context()
    node_id = context.get_node_id()
    if any(node["NodeID"] == node_id and _HEAD in node["Resources"] for node in ray.nodes()):
        return True
    deadline_ms = round((time.time() + notice_s) * 1000)
    drain_node(context.gcs_address, node_id, "this node is to end", deadline_ms)
    return False


def _num_other_nodes() -> int:
    """Also 0 where Ray has ended: then there is no node to wait for."""
    import ray

    try:
        return sum(bool(node["Alive"]) for node in ray.nodes()) - 1
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds
        logger.warning("Ray does not answer: %s", error)
        return 0


_ANSWER_S: Final = 10.0


class ServeSteps:
    """Steps of an update for the model of `config`."""

    def __init__(
        self,
        config: HoldfastConfig,
        known_answers: Sequence[KnownAnswer] = (),
        share: float = 0.0,
        is_audited: bool = False,
    ) -> None:
        """`config` fits the cluster (`serving.fitted`). `is_audited`: the canary is audited, once it answers."""
        self._config = config
        self._namespace, self._model = config.cluster.namespace, config.model.name
        self._directory: Any = models.directory_of(self._namespace)
        self._known_answers = known_answers
        self._share, self._is_audited = share, is_audited
        self.num_audited = 0

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def applications(self) -> Sequence[str]:
        return models.applications_of(self._namespace, self._model)

    def next_application(self) -> str:
        last = max(map(models.generation_of, self.applications()), default=0)
        return models.application_name(self._namespace, self._model, last + 1)

    def snapshot(self) -> Snapshot:
        from ray import serve

        snapshot: Snapshot = self._directory.watch.remote(0).result(timeout_s=_ANSWER_S)
        for name, status in serve.status().applications.items():
            if name in self.applications() and status.status == "DEPLOY_FAILED":
                reasons = [one.message for one in status.deployments.values() if one.message]
                raise ReplicaError(f"Serve gave up: {' '.join([status.message, *reasons])}")
        return snapshot

    def order(self, change: Change) -> None:
        models.order(self._directory, change)

    def deploy(self) -> str:
        name = self.next_application()
        one = self._config.cluster.model_copy(update={"replicas": 1})
        config = self._config.model_copy(update={"cluster": one})
        models.deploy([config], self._namespace, self._directory, models.generation_of(name))
        return name

    def scale(self, application: str, num_replicas: int) -> None:
        models.scale(application, num_replicas)

    def delete(self, application: str) -> None:
        models.delete([application], self._config.cluster.drain_timeout_s)
        models.unpin(self._namespace, self._model)  # with it the update has ended, one way or the other

    def wrong_answers(self, version: str) -> Sequence[str]:
        """Asks one of the routers, as any client does, with ids that fall into the canary's share."""
        return [*self._wrong_known_answers(version), *self._found_by_audit(version)]

    def _found_by_audit(self, version: str) -> Sequence[str]:
        if not self._is_audited or self.num_audited:
            return ()
        routers = [one.http_address for one in self.snapshot().serving(Role.ROUTER) if one.http_address]
        if not routers:
            raise ConfigurationError("--audit: no router answers over HTTP (cluster.http_port), by which it asks")
        from holdfast.cluster.serve.canary_audit import audited

        options = self._config.client.options
        tls = options.get("tls")
        address = f"{'http' if tls is None else 'https'}://{routers[0]}"
        context = True if tls is None else tls.client_context()
        audit = audited(address, options["api_key"], self._model, version, self._share, tls=context)
        self.num_audited = audit.num_answers
        return audit.found

    def _wrong_known_answers(self, version: str) -> Sequence[str]:
        if not self._known_answers:
            return ()
        from holdfast.cluster.client.blocking_client import Client

        routers = [str(one.address) for one in self.snapshot().serving(Role.ROUTER)]
        with Client(routers, **self._config.client.options) as client:
            found = [self._wrong(client, version, known) for known in self._known_answers]
        return [one for one in found if one]

    def _wrong(self, client: Any, version: str, known: KnownAnswer) -> str:
        """The fault of one answer, in words; empty if it is right, or if only other versions had room to answer."""
        from holdfast.cluster.serve.canary_audit import NUM_ASKED, own_id

        params = SamplingParams(temperature=0.0, max_tokens=known.num_tokens)
        for _ in range(NUM_ASKED):
            try:
                answer = client.generate(known.prompt, params, model=self._model, request_id=own_id(self._share))
            except CallerError:
                raise
            except HoldfastError as error:
                return f"{known.prompt!r}: {error}"
            if version_of(answer.system_fingerprint) == version:
                text = answer.completions[0].text
                return "" if text.startswith(known.starts_with) else f"{known.prompt!r} gave {text[:80]!r}"
        return ""
