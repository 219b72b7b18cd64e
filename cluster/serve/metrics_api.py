"""Metrics of a replica on a separate port, for gateways that scrape the replicas they pick from."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from holdfast.cluster.serve.member_process import on_first_free
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.api.http.answering import answering, not_found
from holdfast.router.api.http.event_stream import OPENAI
from holdfast.router.api.http.request_origin import RequestOrigins, guarded
from holdfast.router.api.http.server import HttpServer
from holdfast.router.metrics.exposition import Sample, exposed, gateway_samples, process_samples, replica_samples
from holdfast.router.security.gate import Gate
from holdfast.worker.errors import ReplicaError
from holdfast.worker.replica.replica import Replica
from holdfast.worker.wire.loopback import host_port

METRICS: Final = "/metrics"
HEALTH: Final = "/health"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Address of a replica's metrics."""

    host: str = "127.0.0.1"
    port: int = 0
    """The first that is tried, of several in a row; 0: any free one."""


class MetricsApi:
    """Metrics API of one replica, on the running event loop. Made by `start`."""

    def __init__(self, replica: Replica, replica_id: str, settings: MetricsSettings, security: ClusterSecurity) -> None:
        """Raises `ConfigurationError` where no port is free."""
        self._replica = replica
        self._replica_id = replica_id
        host, tls = settings.host, security.server_tls
        app = self._app(security.gate, RequestOrigins(host))
        self._server = on_first_free(
            lambda port: HttpServer(app, host, port, None if tls is None else tls.context()),
            host,
            settings.port,
            "cluster.metrics_port",
        )
        self.address = host_port(host, self._server.port)
        """`host:port`."""

    @classmethod
    async def start(
        cls, replica: Replica, replica_id: str, settings: MetricsSettings, security: ClusterSecurity
    ) -> "MetricsApi":
        """Listens when this returns."""
        api = cls(replica, replica_id, settings, security)
        await api._server.start()
        return api

    async def stop(self) -> None:
        await self._server.stop(0.0)

    def _app(self, gate: Gate, origins: RequestOrigins) -> Starlette:
        endpoints = {METRICS: self._metrics, HEALTH: self._health}
        return Starlette(
            routes=[
                Route(path, answering(guarded(endpoint, path, gate, origins), OPENAI), methods=["GET"])
                for path, endpoint in endpoints.items()
            ],
            exception_handlers={404: not_found, 405: not_found},
        )

    async def _metrics(self, request: Request) -> ASGIApp:
        text, media_type = exposed(self._samples())
        return Response(text, headers={"content-type": media_type})

    async def _health(self, request: Request) -> ASGIApp:
        """200 while the engine runs."""
        if self._replica.engine.failure is not None:
            raise ReplicaError("the engine has ended")
        return Response()

    def _samples(self) -> Iterator[Sample]:
        engine, info = self._replica.engine, self._replica.info
        load = engine.load
        yield from replica_samples(info.model, self._replica_id, load, engine.reported_stats)
        yield from gateway_samples(
            info.model,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=load.num_free_blocks,
            num_total_blocks=load.num_total_blocks,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
        )
        yield from process_samples(version("holdfast"))
