"""Callers with clients of their own: gateways at each replica's engine API, and deployments that ask by handle."""

import asyncio
from collections.abc import Sequence

import pytest

from holdfast.cluster.serve import models
from holdfast.cluster.serve.start_up import Serving
from tests.integration import models_at_run_time as run_time
from tests.integration import stock_clients
from tests.integration.streams import both_are_back, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def test_gateways_drive_each_replica(cluster: Serving):
    tokens = asyncio.run(stock_clients.tokens_of(cluster.routers[0], 16))
    engines = asyncio.run(engines_of_all_replicas(len(cluster.engines)))
    for engine in engines:
        assert asyncio.run(stock_clients.by_a_gateway(engine, 16)) == ("demo", tokens)


async def engines_of_all_replicas(num_replicas: int) -> Sequence[str]:
    """Where the replicas' engines listen, once those that other tests killed are forgotten and replaced."""

    async def listed() -> Sequence[str]:
        (model,) = await asyncio.to_thread(models.list_models, "holdfast")
        return model.engines

    async def are_listed() -> bool:
        return len(await listed()) == num_replicas

    await until(are_listed, timeout_s=60)
    return await listed()


def test_deployments_of_others_ask_by_handle(cluster: Serving):
    from ray import serve  # not before the cluster has been started: it closes Ray off only then

    run_time.deploy_a_caller()
    caller = serve.get_app_handle("someone")
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    text = asyncio.run(run_time.answer_of(cluster.routers[0], "demo", run_time.SHORT))
    assert caller.whole.remote(run_time.PROMPT, greedy).result(timeout_s=60) == text
    streamed = caller.streamed.remote(run_time.PROMPT, greedy).result(timeout_s=60)
    assert "".join(streamed) == text
    assert len(streamed) > 1
    refusal = caller.refused.remote(run_time.PROMPT, {"temperature": -1.0}).result(timeout_s=60)
    assert "sampling_params.temperature = -1.0" in refusal
    assert caller.left.remote(run_time.PROMPT, greedy | {"max_tokens": 400}).result(timeout_s=60) > 0
    asyncio.run(both_are_back(cluster.routers))
    serve.delete("someone")
