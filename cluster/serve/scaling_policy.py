"""Autoscaling policy for Ray Serve: hosts the autoscaler core in Serve's controller, and asks the directory for demand.

Serve sends this module's class to its controller by value, so its imports are inside its methods. Traffic does
not pass through Serve, whose own counts are therefore zero.
"""

import dataclasses
import logging
import threading
import time
import weakref
from typing import Any

logger = logging.getLogger("ray.serve")


class ScalingPolicy:
    """One model's policy. Serve makes it with `policy_kwargs` and calls it several times a second."""

    def __init__(self, model: str, namespace: str, max_num_seqs: int, settings: dict[str, Any]) -> None:
        from holdfast.cluster.scaling.autoscaler import Autoscaler
        from holdfast.cluster.scaling.demand_book import ScalingConfig

        config = ScalingConfig(**settings)
        self._model = model
        self._core = Autoscaler(config, max_num_seqs)
        self._wait_s = config.cold_start_wait_s if config.sleeps else None
        self._latest: dict[str, Any] = {}
        self._ended = threading.Event()
        arguments = (self._ended, self._latest, model, namespace, self._wait_s)
        threading.Thread(target=_follow, args=arguments, name=f"demand of {model}", daemon=True).start()
        weakref.finalize(self, self._ended.set)  # Serve makes another with every new deployment

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Takes each observation once, and keeps the number until there is a new one."""
        from holdfast.cluster.scaling.autoscaler import Seen

        wanted = context.target_num_replicas
        heard = self._latest.pop("heard", None)
        if heard is None:
            return wanted, {}
        try:
            demand, pinned = heard
            if context.app_name in pinned:
                return pinned[context.app_name], {}
            seen = Seen(now_s=time.monotonic(), num_wanted=wanted, demand=_own(demand, context.running_replicas))
            decision = self._core.decide(seen)
        except Exception:  # the controller has others to look after
            logger.exception("no decision about the replicas of %s", self._model)
            return wanted, {}
        if decision.num_replicas != wanted:
            logger.warning(
                "model %s: from %d to %d replicas: %s", self._model, wanted, decision.num_replicas, decision.reason
            )
        return decision.num_replicas, {}


def _own(demand: Any, running: Any) -> Any:
    """The demand with the replicas of this deployment alone: during an update another one serves the same model."""
    if demand is None:
        return None
    own = {replica.unique_id for replica in running}
    return dataclasses.replace(demand, replicas=tuple(one for one in demand.replicas if one.replica_id in own))


def _follow(ended: Any, latest: dict[str, Any], model: str, namespace: str, wait_s: float | None) -> None:
    """Asks the directory about a model once a second, on a thread: the controller's event loop must not wait."""
    from ray import serve

    from holdfast.cluster.serve.directory import DIRECTORY

    handle = None
    while not ended.wait(1.0):
        try:
            handle = handle or serve.get_deployment_handle(DIRECTORY, namespace)
            latest["heard"] = handle.demand.remote(model, wait_s).result(timeout_s=5.0)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds while a directory is replaced
            logger.info("the directory did not return the demand of %s: %s", model, error)
            handle = None
