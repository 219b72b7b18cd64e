"""Router: composes its parts, and starts and stops them in order. No decisions here."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import grpc

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.demand import ModelDemand
from holdfast.router.dispatch.call import stopping
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.doors.grpc import admin, endpoint_picker, health, server
from holdfast.router.doors.grpc.load_reports import LoadReports
from holdfast.router.doors.http.app import HttpDoor
from holdfast.router.doors.http.server import HttpServer
from holdfast.router.doors.in_process import InProcessDoor
from holdfast.router.doors.oip import servicer as open_inference
from holdfast.router.doors.operators import Operators, SendChange
from holdfast.router.doors.recent_errors import RecentErrors
from holdfast.router.doors.state_dump import state_dump
from holdfast.router.events import ModelStatus
from holdfast.router.links.link_pool import LinkPool
from holdfast.router.links.replica_directory import DirectoryView, ReplicaDirectory, RouterEndpoint
from holdfast.router.orders import NO_ORDERS, Change, Orders
from holdfast.router.replicas.versions import VersionCounts
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.requests.slow_requests import SlowRequests
from holdfast.router.security.gate import Gate
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.worker.config import ServiceOrderConfig, TelemetryConfig
from holdfast.worker.log_level import PACKAGE, set_log_level
from holdfast.worker.security.link_security import UNSECURED, LinkSecurity
from holdfast.worker.security.tls import ServerTls, add_port

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

FULL_DISKS = (
    "there is little room under Ray's session folder on nodes of {} routers and replicas: streams go on, but what ends "
    "there is not replaced until there is room; delete old sessions beside it, or what else fills the disk"
)

CLOSE_GRACE_S = 1.0
"""Seconds that the server waits for the ended calls to send their status."""


class Router:
    """One router on the running event loop. Made by `start`."""

    def __init__(
        self,
        config: RouterConfig,
        limits: LimitsConfig,
        load_tokenizer: Callable[[str], Tokenizer],
        order: ServiceOrderConfig | None = None,
        gate: Gate | None = None,
        tls: ServerTls | None = None,
        links: LinkSecurity = UNSECURED,
        on_models: Callable[[Sequence[ModelStatus]], None] | None = None,
        send_change: SendChange | None = None,
        telemetry: TelemetryConfig | None = None,
        tracer: "Tracer | None" = None,
    ) -> None:
        self._tls, self._limits = tls, limits
        self._on_models = on_models
        picks = config.endpoint_picker
        self._health = health.HealthServicer(
            (*health.OVERALL, *(endpoint_picker.HEALTH_NAMES if picks else ())), ("liveness",) if picks else ()
        )
        self._picker = endpoint_picker.EndpointPicker(self._as_endpoint, random.Random().randrange) if picks else None
        gate = gate or Gate()
        dispatch = Dispatch(config, limits, random.Random().randrange, order=order)
        self._dispatch_host = DispatchHost(dispatch, asyncio.get_running_loop(), self._publish_health)
        tokenizers = TokenizerRegistry(load_tokenizer, config.inline_tokenize_bytes)
        self._request_processor = RequestProcessor(self._dispatch_host, tokenizers, limits, gate, tracer)
        telemetry, stats = telemetry or TelemetryConfig(), self._request_processor.stats
        if telemetry.slow_request_s is not None:
            stats.on_end.append(SlowRequests(telemetry.slow_request_s, stats))
        self._link_pool = LinkPool(self._dispatch_host, tokenizers, config, links, self._obey, self._see)
        self.orders = NO_ORDERS
        """What its operators have ordered."""
        self.warnings: tuple[str, ...] = ()
        """What is wrong with the cluster although it serves, for health."""
        parts = self._request_processor, self._dispatch_host
        self._recent_errors = RecentErrors()
        logging.getLogger(PACKAGE).addHandler(self._recent_errors)
        operators = Operators(
            *(*parts, gate, send_change or self._alone, lambda: self.orders, partial(self._dump, config)),
            kill=self._link_pool.kill if config.killable else None,
        )
        servicers = {
            admin.SERVICE: admin.AdminServicer(operators),
            server.SERVICE: server.InferenceServicer(*parts),
            open_inference.SERVICE: open_inference.InferenceProtocolServicer(*parts),
            health.SERVICE: self._health,
        }
        if self._picker is not None:
            servicers[endpoint_picker.SERVICE] = endpoint_picker.EndpointPickerServicer(self._picker)
        self._build_server = partial(server.build_server, config=config, limits=limits, gate=gate)
        trailers = LoadReports(self._dispatch_host).trailers if config.load_reports else None
        self._server: grpc.aio.Server = self._build_server(servicers, trailers=trailers)
        self._admin_server: grpc.aio.Server | None = None
        self._http_door = HttpDoor(*parts, limits, gate, operators, lambda: self.warnings)
        self.in_process = InProcessDoor(self._request_processor, gate)
        """For calls from this process."""
        self._http_server: HttpServer | None = None
        self._following: asyncio.Task[None] | None = None
        self.address = ""
        """`host:port` of the gRPC API, once started."""
        self.http_address = ""
        """`host:port` of the HTTP API, once started; empty where there is none."""
        self.advertised_http_address = ""
        """`host:port` of the HTTP API as others dial it, set by whoever knows; empty: as it listens."""
        self.admin_address = ""
        """`host:port` for operators, once started; empty where there is none."""

    @classmethod
    async def start(
        cls,
        config: RouterConfig,
        limits: LimitsConfig,
        directory: ReplicaDirectory,
        host: str = "127.0.0.1",
        port: int = 0,
        load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
        order: ServiceOrderConfig | None = None,
        http_port: int | None = None,
        admin_port: int | None = None,
        gate: Gate | None = None,
        tls: ServerTls | None = None,
        links: LinkSecurity = UNSECURED,
        on_models: Callable[[Sequence[ModelStatus]], None] | None = None,
        send_change: SendChange | None = None,
        telemetry: TelemetryConfig | None = None,
        tracer: "Tracer | None" = None,
    ) -> "Router":
        """A router that listens on `host:port` (port 0 picks a free one) and dials the replicas of `directory`.

        With an `http_port` it serves HTTP as well, with an `admin_port` channelz on loopback. Does not wait for
        replicas: until one is up, requests are UNAVAILABLE and health is NOT_SERVING. The `gate` lets callers in at
        every port; without it all may come. gRPC and HTTP are served over `tls`, if it is given, and `links` says how
        replicas are dialled. `on_models` is told the models that are served here, when they change. `send_change` has
        what operators order obeyed by all routers; without it, this one obeys alone. `telemetry` says what it logs of
        requests, and with a `tracer` they are traced. Raises `RuntimeError` if a port is taken.
        """
        router = cls(
            *(config, limits, load_tokenizer, order, gate, tls, links, on_models, send_change, telemetry, tracer)
        )
        await router._listen(host, port)
        if http_port is not None:
            await router._listen_http(host, http_port)
        if admin_port is not None:
            await router._listen_admin(admin_port)
        router._following = asyncio.create_task(router._link_pool.follow(directory), name="replica directory")
        return router

    async def stop(self, grace_s: float = 0.0, *, hands_over: bool = False) -> None:
        """Stops in order: unhealthy first, then no new requests; open ones have `grace_s` to end and are then ended.

        With `hands_over`, for when other routers serve, calls whose clients submit them again are ended at once. Every
        call has ended when it returns.
        """
        self._health.stop()
        self._http_door.stop()
        self._request_processor.close()
        if hands_over:
            self._dispatch_host.hand_over(stopping())
        idle = asyncio.Event()
        self._dispatch_host.when_idle(idle.set)
        try:
            async with asyncio.timeout(grace_s):
                await idle.wait()
        except TimeoutError:
            logger.info("%d requests did not end in time; they are ended", self._dispatch_host.num_open)
        self._dispatch_host.close_all(stopping())
        await self._server.stop(CLOSE_GRACE_S)
        if self._admin_server is not None:
            await self._admin_server.stop(None)
        if self._http_server is not None:
            await self._http_server.stop(CLOSE_GRACE_S)
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._link_pool.stop()
        logging.getLogger(PACKAGE).removeHandler(self._recent_errors)

    @property
    def num_open(self) -> int:
        """Open requests, queued ones included."""
        return self._dispatch_host.num_open

    def demands(self) -> tuple[ModelDemand, ...]:
        """The load of every model here, for who decides how many replicas it has."""
        return self._dispatch_host.demands()

    def check_integrity(self) -> None:
        """Asserts that the router's tables agree with each other."""
        self._dispatch_host.check_integrity()

    def version_counts(self) -> tuple[VersionCounts, ...]:
        """What came of requests, by model and version."""
        return self._dispatch_host.version_counts()

    def _dump(self, config: RouterConfig) -> str:
        num_paused = self._request_processor.pauses.num_waiting
        errors = self._recent_errors.lines
        return state_dump(self._dispatch_host, self.orders, config, self._limits, errors, num_paused)

    async def _alone(self, change: Change) -> Orders:
        """For a router without a cluster."""
        orders = change.applied_to(self.orders)
        await self._link_pool.obey(orders)
        return orders

    def _as_endpoint(self) -> RouterEndpoint | None:
        """This router as its own picker sees it; None while it serves no HTTP."""
        if self._http_server is None or self._http_door.is_stopping:
            return None
        has_replicas = any(model.takes_requests for model in self._dispatch_host.models())
        address = self.advertised_http_address or self.http_address
        return RouterEndpoint(address=address, num_open=self.num_open, has_replicas=has_replicas)

    def _see(self, view: DirectoryView) -> None:
        self.warnings = (FULL_DISKS.format(view.num_on_full_disks),) if view.num_on_full_disks else ()
        if self._picker is not None:
            self._picker.set_routers(view.routers)

    def _obey(self, orders: Orders) -> None:
        self.orders = orders
        self._dispatch_host.set_orders(orders)
        self._request_processor.pauses.set(orders.pauses)
        if orders.log_level is not None:
            set_log_level(orders.log_level)

    async def _listen(self, host: str, port: int) -> None:
        bound = add_port(self._server, f"{host}:{port}", self._tls)
        await self._server.start()
        self.address = f"{host}:{bound}"
        logger.info("the router listens on %s", self.address)

    async def _listen_http(self, host: str, port: int) -> None:
        try:
            self._http_server = HttpServer(
                self._http_door.app(), host, port, None if self._tls is None else self._tls.context(), self._limits
            )
        except OSError as taken:
            await self._server.stop(None)
            raise RuntimeError(f"HTTP cannot listen on {host}:{port}: {taken}") from taken
        await self._http_server.start()
        self.http_address = f"{host}:{self._http_server.port}"
        logger.info("the router serves HTTP on %s", self.http_address)

    async def _listen_admin(self, port: int) -> None:
        from holdfast.router.doors.grpc import channelz  # few need it

        admin = {channelz.SERVICE: channelz.ChannelzServicer(), health.SERVICE: self._health}
        self._admin_server = self._build_server(admin)
        try:
            bound = self._admin_server.add_insecure_port(f"{LOOPBACK}:{port}")
        except RuntimeError:
            await self._server.stop(None)
            if self._http_server is not None:
                await self._http_server.stop(0.0)
            raise
        await self._admin_server.start()
        self.admin_address = f"{LOOPBACK}:{bound}"
        logger.info("the router serves operators on %s", self.admin_address)

    def _publish_health(self) -> None:
        models = self._dispatch_host.models()
        self._health.publish(models)
        if self._on_models is not None:
            self._on_models(models)
