"""Told settings: what replicas and routers say of how they were started, so that others can compare and change it.

JSON of sections of `HoldfastConfig`, without secrets. What may not live here: what differs (`difference.py`).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.worker.config import ServiceOrderConfig

OF_REPLICAS: Final = (
    "cpus_per_rank",
    "rank_resources",
    "rank_labels",
    "span_nodes",
    "engine_port",
    "metrics_port",
    "drain_timeout_s",
)
"""Settings of the cluster that each model has its own of, besides the number of its replicas."""

ORDER: Final = tuple(ServiceOrderConfig.model_fields)
"""What a router has of the section `scheduler`."""


def of_replica(config: HoldfastConfig) -> str:
    """Of one model."""
    cluster = config.cluster.model_dump(mode="json", include=set(OF_REPLICAS))
    if not config.cluster.cpus_per_rank:  # fitted into a Ray of our own: the next one is fitted anew
        del cluster["cpus_per_rank"], cluster["rank_resources"]
    scaling = config.scaling.model_dump(mode="json")
    return json.dumps({**config.worker.model_dump(mode="json"), "scaling": scaling, "cluster": cluster})


def of_router(config: HoldfastConfig) -> str:
    """Of the cluster's routers."""
    sections = {"router", "limits", "overload", "telemetry", "health", "security"}
    tree = config.model_dump(mode="json", include=sections)
    tree["scheduler"] = config.scheduler.model_dump(mode="json", include=set(ORDER))
    tree["cluster"] = config.cluster.model_dump(mode="json", exclude={"models"})
    return json.dumps(tree)


def router_config(told: str) -> HoldfastConfig:
    """The settings of `of_router`. Those of models are defaults."""
    tree: Mapping[str, Any] = json.loads(told)
    return HoldfastConfig.model_validate(tree)
