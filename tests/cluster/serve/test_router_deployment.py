"""What a router is started with."""

import asyncio

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve import router_deployment
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.router import Router
from holdfast.worker.config import SchedulerConfig


def test_a_router_serves_in_the_order_of_its_replicas(monkeypatch):
    started = {}

    async def start(*arguments: object, **options: object) -> None:
        started.update(options)

    monkeypatch.setattr(Router, "start", start)
    config = HoldfastConfig(scheduler=SchedulerConfig(aging_s=7.0, tenant_shares={"gold": 4.0}))
    asyncio.run(router_deployment._start(config, "127.0.0.1", None, ClusterSecurity(token="t")))
    assert (started["order"].aging_s, started["order"].tenant_shares) == (7.0, {"gold": 4.0})
