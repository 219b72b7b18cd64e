"""Metrics of one replica on a port of its own: its own figures alone, behind the cluster's keys."""

import socket
from types import SimpleNamespace

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.cluster.serve.metrics_api import MetricsApi, MetricsSettings
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.config import SecurityConfig
from holdfast.router.security.api_keys import KeyRing, write_keys
from holdfast.worker.errors import ConfigurationError, ReplicaError
from tests.loops import on_a_loop
from tests.router.metrics.test_catalogue import LOAD, STATS
from tests.router.security.test_gate import key_of, secret_of

OPEN = ClusterSecurity(token="t" * 40)


def replica(failure: Exception | None = None) -> SimpleNamespace:
    engine = SimpleNamespace(load=LOAD, reported_stats=STATS, failure=failure)
    return SimpleNamespace(engine=engine, info=SimpleNamespace(model="m", block_size=16, num_blocks=10))


async def got(api: MetricsApi, path: str, key: str = "") -> httpx2.Response:
    async with httpx2.AsyncClient() as client:
        return await client.get(f"http://{api.address}{path}", headers={"x-api-key": key})


@on_a_loop
async def test_a_replica_tells_its_own_figures():
    api = await MetricsApi.start(replica(), "r1", MetricsSettings(), OPEN)
    answer = await got(api, "/metrics")
    heard = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert heard["holdfast_replica_requests_running", "m", "r1"] == heard["vllm:num_requests_running", "m"] == 3
    assert heard["vllm:num_requests_waiting", "m"] == 1
    assert heard["holdfast_replica_step_phase_seconds_total", "m", "plan", "r1"] == 1
    assert (await got(api, "/health")).status_code == 200
    assert (await got(api, "/v1/models")).status_code == 404
    await api.stop()


@on_a_loop
async def test_health_tells_of_an_engine_that_has_ended():
    api = await MetricsApi.start(replica(ReplicaError("gone")), "r1", MetricsSettings(), OPEN)
    assert (await got(api, "/health")).status_code == 503
    assert (await got(api, "/metrics")).status_code == 200
    await api.stop()


@on_a_loop
async def test_metrics_are_an_operators_and_health_is_open(tmp_path):
    path = tmp_path / "keys.json"
    write_keys(path, KeyRing([key_of("alice"), key_of("olga", operator=True)]))
    security = ClusterSecurity(token="t" * 40, settings=SecurityConfig(api_keys=path))
    api = await MetricsApi.start(replica(), "r1", MetricsSettings(), security)
    statuses = [(await got(api, "/metrics", key)).status_code for key in ("", secret_of("alice"), secret_of("olga"))]
    assert statuses == [401, 403, 200]
    assert (await got(api, "/health")).status_code == 200
    await api.stop()


@on_a_loop
async def test_the_next_port_is_taken_where_the_first_is_not_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        api = await MetricsApi.start(replica(), "r1", MetricsSettings(port=port), OPEN)
        assert api.address != f"127.0.0.1:{port}"
        await api.stop()


@on_a_loop
async def test_an_address_that_is_none_is_refused_by_the_settings_name():
    with pytest.raises(ConfigurationError, match=r"cluster.metrics_port = 9"):
        await MetricsApi.start(replica(), "r1", MetricsSettings(host="192.0.2.1", port=9), OPEN)
