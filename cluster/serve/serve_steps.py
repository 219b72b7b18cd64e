"""Steps of a rolling update on Ray Serve, from a process that is connected to Ray.

What may not live here: their order (`updates.py`).
"""

import time
from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve import models
from holdfast.cluster.serve.canary import KnownAnswer
from holdfast.cluster.serve.directory import Role, Snapshot
from holdfast.router.orders import Change
from holdfast.router.replicas.versions import position
from holdfast.worker.errors import CallerError, HoldfastError, ReplicaError
from holdfast.worker.model_info import version_of
from holdfast.worker.sampling_params import SamplingParams

_ANSWER_S: Final = 10.0
_NUM_ASKED: Final = 5
"""A known answer is asked so often at most until the canary is the one that answers: it may be full."""


class ServeSteps:
    """For one model: that of `config`."""

    def __init__(
        self,
        config: HoldfastConfig,
        known_answers: Sequence[KnownAnswer] = (),
        share: float = 0.0,
    ) -> None:
        """`config` fits the cluster (`serving.fitted`)."""
        self._config = config
        self._namespace, self._model = config.cluster.namespace, config.model.name
        self._directory: Any = models.directory_of(self._namespace)
        self._known_answers = known_answers
        self._share = share

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
        if not self._known_answers:
            return ()
        from holdfast.cluster.client.blocking_client import Client

        routers = [str(one.address) for one in self.snapshot().serving(Role.ROUTER)]
        with Client(routers, **self._config.client.options) as client:
            found = [self._wrong(client, version, known) for known in self._known_answers]
        return [one for one in found if one]

    def _wrong(self, client: Any, version: str, known: KnownAnswer) -> str:
        """What is wrong with one answer; empty if nothing is, or if only others had room to answer."""
        params = SamplingParams(temperature=0.0, max_tokens=known.num_tokens)
        for _ in range(_NUM_ASKED):
            try:
                answer = client.generate(known.prompt, params, model=self._model, request_id=self._own_id())
            except CallerError:
                raise
            except HoldfastError as error:
                return f"{known.prompt!r}: {error}"
            if version_of(answer.system_fingerprint) == version:
                text = answer.completions[0].text
                return "" if text.startswith(known.starts_with) else f"{known.prompt!r} gave {text[:80]!r}"
        return ""

    def _own_id(self) -> str:
        while True:
            request_id = f"known-answer-{uuid4().hex}"
            if position(request_id) < self._share:
                return request_id
