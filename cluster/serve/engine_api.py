"""vLLM's engine protocol on a replica: the router's pipeline over the engine of this process, and a port for it."""

from dataclasses import dataclass, field
from typing import Final

import grpc

from holdfast.cluster.offline.local_router import connected, local_pipeline
from holdfast.cluster.serve.member_process import on_first_free
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.grpc import server
from holdfast.router.api.grpc import standard_services as health
from holdfast.router.api.intake import DecodeWorker
from holdfast.router.api.vllm import servicer as vllm_engine
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.endings import stopping
from holdfast.router.security.gate import Gate
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.replica.replica import Replica
from holdfast.worker.wire.loopback import host_port
from holdfast.worker.wire.tls import add_port

CLOSE_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Address of a replica's engine protocol, and its limits."""

    host: str = "127.0.0.1"
    port: int = 0
    """The first that is tried, of several in a row; 0: any free one."""
    router: RouterConfig = field(default_factory=RouterConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)


class EngineApi:
    """Engine protocol of one replica, on the running event loop. Made by `start`."""

    def __init__(
        self,
        replica: Replica,
        config: RouterConfig,
        limits: LimitsConfig,
        order: SchedulerConfig,
        security: ClusterSecurity | None = None,
    ) -> None:
        gate = Gate() if security is None else security.gate
        self._tls = None if security is None else security.server_tls
        self._pipeline = local_pipeline(config, limits, self._publish_health, order=order, gate=gate)
        self._health = health.HealthServicer(("", vllm_engine.SERVICE.full_name))
        worker = self._decode_worker = DecodeWorker()
        engine = vllm_engine.VllmEngineServicer(
            self._pipeline.processor, replica.engine, replica.info, order.max_num_seqs, worker
        )
        servicers = {vllm_engine.SERVICE: engine, health.SERVICE: self._health}
        self._guard = ConnectionGuard(limits, asks_for_keys=gate.is_locked)
        self._server: grpc.aio.Server = server.build_server(
            servicers, config, limits, gate=gate, guard=self._guard, decode_worker=worker
        )
        self.address = ""
        """`host:port`, once started."""

    @classmethod
    async def start(
        cls, replica: Replica, settings: ApiSettings, order: SchedulerConfig, security: ClusterSecurity | None = None
    ) -> "EngineApi":
        """Starts the API. Without `security` it takes every caller, unencrypted. Raises `ConfigurationError` if no port
        is free.
        """
        api = cls(replica, settings.router, settings.limits, order, security)
        await connected(replica, api._pipeline)
        host = settings.host
        bound = on_first_free(
            lambda port: add_port(api._server, host_port(host, port), api._tls),
            host,
            settings.port,
            "cluster.engine_port",
        )
        api.address = host_port(host, bound)
        await api._server.start()
        api._guard.start(bound)
        return api

    def wind_down(self) -> None:
        """Refuses new requests from now on; open ones continue."""
        self._health.stop()
        self._pipeline.processor.close()

    async def stop(self) -> None:
        """Ends all open calls. The engine may have ended before."""
        self._pipeline.dispatch_host.close_all(stopping())
        await self._server.stop(CLOSE_GRACE_S)
        self._decode_worker.close()
        await self._guard.stop()

    def _publish_health(self) -> None:
        self._health.publish(self._pipeline.dispatch_host.dispatch.models())
