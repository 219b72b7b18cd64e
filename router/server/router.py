"""Router: composes its parts, and starts and stops them in order. No decisions here."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.grpc import admin, endpoint_picker, server
from holdfast.router.api.grpc import standard_services as health
from holdfast.router.api.http.app import HttpApi
from holdfast.router.api.http.request_origin import RequestOrigins
from holdfast.router.api.http.request_reader import body_bounds
from holdfast.router.api.intake import DecodeWorker, Intake
from holdfast.router.api.load_reports import LoadReports
from holdfast.router.api.open_inference import servicer as open_inference
from holdfast.router.api.operators import Operators, RecentErrors, SendChange, state_dump
from holdfast.router.api.overload_probe import OverloadProbe, max_memory
from holdfast.router.api.public_answer import InProcessApi
from holdfast.router.cluster_control import ClusterControl
from holdfast.router.config import LimitsConfig, OverloadConfig, RouterConfig
from holdfast.router.demand import ModelDemand
from holdfast.router.dispatch.endings import stopping
from holdfast.router.dispatch.versions import VersionCounts
from holdfast.router.events import ModelStatus
from holdfast.router.links.link_pool import LinkPool
from holdfast.router.links.replica_directory import DirectoryView, ReplicaDirectory, RouterEndpoint
from holdfast.router.links.replica_pins import ReplicaPins
from holdfast.router.operator_state import NO_OPERATOR_STATE, Change, OperatorState
from holdfast.router.overload.byte_ledger import ByteLedger
from holdfast.router.overload.overload import Overload
from holdfast.router.requests.poison_watch import PoisonWatch
from holdfast.router.requests.request_processor import Pipeline
from holdfast.router.requests.request_stats import SlowRequests
from holdfast.router.security.gate import Gate
from holdfast.router.server.ports import Ports
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.adapter import Adapter
from holdfast.worker.config import ServiceOrderConfig, TelemetryConfig
from holdfast.worker.log_level import PACKAGE, set_log_level
from holdfast.worker.timers import WallClock
from holdfast.worker.wire.link_security import UNSECURED, LinkSecurity
from holdfast.worker.wire.loopback import LOOPBACK
from holdfast.worker.wire.tls import Certificates, ServerTls

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

FULL_DISKS = (
    "there is little room under Ray's session folder on nodes of {} routers and replicas: streams go on, but what ends "
    "there is not replaced until there is room; delete old sessions beside it, or what else fills the disk"
)

CLOSE_GRACE_S = 1.0
"""Seconds that the server waits for the ended calls to send their status."""


SWITCH_INTERVAL_S: Final = 0.001
"""Switch interval of a router's process (`sys.setswitchinterval`; Python's own is 5 ms): how long its event loop waits
for Python's lock when a thread holds it, as threads do that decode and check large requests."""


class RouterOptions(TypedDict, total=False):
    """Options of a router for the code that runs it."""

    load_tokenizer: Callable[[str], Tokenizer]
    """Reads the tokenizer in a model's folder."""
    overload: OverloadConfig | None
    """Overload protection."""
    order: ServiceOrderConfig | None
    """The order of the replicas' own queues."""
    gate: Gate | None
    """Lets callers in at every port; without it all may come."""
    tls: ServerTls | None
    """TLS of gRPC and HTTP."""
    links: LinkSecurity
    """Security of links to replicas."""
    on_models: Callable[[Sequence[ModelStatus]], None] | None
    """Called with the models that are served here, when they change."""
    send_change: SendChange | None
    """Sends a change of the operator state to all routers; without it, it holds for this one alone."""
    control: ClusterControl | None
    """Changes the cluster's models and reads its logs; without it, operators are refused both."""
    telemetry: TelemetryConfig | None
    """Logging of requests."""
    tracer: "Tracer | None"
    """Traces requests."""
    before_opening: Callable[["Router"], None]
    """Called before the first port is open."""


class Router:
    """One router on the running event loop. Made by `start`."""

    def __init__(self, config: RouterConfig, limits: LimitsConfig, **options: Unpack[RouterOptions]) -> None:
        self._config, self._limits = config, limits
        self._on_models = options.get("on_models")
        self.operator_state = NO_OPERATOR_STATE
        """Settings by its operators."""
        self.warnings: tuple[str, ...] = ()
        """Faults of the cluster although it serves, for health."""
        self.advertised_http_address = ""
        """`host:port` of the HTTP API as others dial it, set by the code that knows; empty: as it listens."""
        picks = config.endpoint_picker
        self._health = health.HealthServicer(
            (*health.OVERALL, *(endpoint_picker.HEALTH_NAMES if picks else ())), ("liveness",) if picks else ()
        )
        self._picker = endpoint_picker.EndpointPicker(self._as_endpoint, random.Random().randrange) if picks else None
        gate = self._gate = options.get("gate") or Gate()
        self.poison_watch = PoisonWatch(now=WallClock(time.time(), time.monotonic))
        """Requests that routers were lost with."""
        self._protection = options.get("overload") or OverloadConfig()
        self.overload = Overload(self._protection, ByteLedger(self._protection), max_memory(self._protection))
        pipeline = Pipeline.build(
            config,
            limits,
            options.get("load_tokenizer", Tokenizer.load),
            self._publish_health,
            order=options.get("order"),
            gate=gate,
            tracer=options.get("tracer"),
            overload=self.overload,
            suspends_unread=True,
        )
        self._dispatch_host, self._request_processor = pipeline.dispatch_host, pipeline.processor
        telemetry, stats = options.get("telemetry") or TelemetryConfig(), self._request_processor.stats
        stats.on_end.append(self._request_processor.sessions)
        if telemetry.slow_request_s is not None:
            stats.on_end.append(SlowRequests(telemetry.slow_request_s, stats))
        links = options.get("links", UNSECURED)
        self._certificates = Certificates(options.get("tls"), links.tls)
        self._link_pool = LinkPool(
            self._dispatch_host, pipeline.tokenizers, config, links, self._apply, self._see, self._pinned
        )
        self._recent_errors = RecentErrors()
        logging.getLogger(PACKAGE).addHandler(self._recent_errors)
        self._tasks: list[asyncio.Task[None]] = []
        self.in_process = InProcessApi(self._request_processor, gate)
        """API for calls from this process."""
        self._open_apis(gate, options.get("send_change") or self._alone, options.get("tls"), options.get("control"))

    def _open_apis(
        self, gate: Gate, send_change: SendChange, tls: ServerTls | None, control: ClusterControl | None
    ) -> None:
        """Makes the APIs, which do not listen yet."""
        config, parts = self._config, (self._request_processor, self._dispatch_host)
        worker = self._decode_worker = DecodeWorker()
        operators = Operators(
            *parts,
            gate=gate,
            send=send_change,
            operator_state=lambda: self.operator_state,
            dump=self._dump,
            pins=ReplicaPins(self._link_pool.links),
            kill=self._link_pool.kill if config.killable else None,
            control=control,
        )
        servicers = {
            admin.SERVICE: admin.AdminServicer(operators),
            server.SERVICE: server.InferenceServicer(
                *parts, worker, lambda: self._http_api.history.figures(), self._limits.max_message_bytes
            ),
            open_inference.SERVICE: open_inference.InferenceProtocolServicer(*parts, body_bounds(self._limits), worker),
            health.SERVICE: self._health,
        }
        if self._picker is not None:
            servicers[endpoint_picker.SERVICE] = endpoint_picker.EndpointPickerServicer(self._picker)
        guard = ConnectionGuard(self._limits, asks_for_keys=gate.is_locked)
        intake = Intake(self.overload, gate)
        build_server = partial(
            server.build_server,
            config=config,
            limits=self._limits,
            gate=gate,
            guard=guard,
            decode_worker=worker,
            poison_watch=self.poison_watch,
        )
        reports = LoadReports(self._dispatch_host) if config.load_reports else None
        trailers = None if reports is None else reports.trailers
        self._ports = Ports(build_server(servicers, trailers=trailers, intake=intake), build_server, tls, guard)
        self._http_api = HttpApi(
            *parts,
            self._limits,
            gate,
            operators,
            self._all_warnings,
            guard=guard,
            decode_worker=worker,
            poison_watch=self.poison_watch,
            intake=intake,
            load_reports=reports,
            certificates=self._certificates,
            max_file_bytes=config.store_max_file_bytes,
        )

    @classmethod
    async def start(
        cls,
        config: RouterConfig,
        limits: LimitsConfig,
        directory: ReplicaDirectory,
        host: str = LOOPBACK,
        port: int = 0,
        *,
        http_port: int | None = None,
        admin_port: int | None = None,
        **options: Unpack[RouterOptions],
    ) -> "Router":
        """A router that listens on `host:port` (port 0 picks a free one) and dials the replicas of `directory`.

        With an `http_port` it serves HTTP as well, with an `admin_port` channelz on loopback. Does not wait for
        replicas: until one is up, requests are UNAVAILABLE and health is NOT_SERVING. Raises `RuntimeError` if a port
        is taken, `StoreError` if the store of responses cannot be opened.
        """
        router = cls(config, limits, **options)
        if (prepare := options.get("before_opening")) is not None:
            prepare(router)
        if config.store is not None:
            await router._http_api.open_store(config)
        await router._ports.serve_grpc(host, port)
        if http_port is not None:
            origins = RequestOrigins(host, config.http_allowed_hosts, config.http_cors_origin)
            app = router._http_api.app_for_pages(origins)
            await router._ports.serve_http(app, limits, host, http_port, router.overload)
        if admin_port is not None:
            await router._ports.serve_admin(router._health, admin_port)
        probe = OverloadProbe(router.overload, lambda: router.num_open)
        router._tasks = [
            asyncio.create_task(router._link_pool.follow(directory), name="replica directory"),
            asyncio.create_task(probe.run(), name="overload probe"),
        ]
        return router

    @property
    def address(self) -> str:
        """`host:port` of the gRPC API."""
        return self._ports.grpc

    @property
    def http_address(self) -> str:
        """`host:port` of the HTTP API; empty where there is none."""
        return self._ports.http

    @property
    def admin_address(self) -> str:
        """`host:port` for operators; empty where there is none."""
        return self._ports.admin

    async def stop(self, grace_s: float = 0.0, *, hands_over: bool = False) -> None:
        """Stops in order: unhealthy first, then no new requests; open ones have `grace_s` to end and are then ended.

        With `hands_over`, for when other routers serve, calls whose clients submit them again are ended at once. Every
        call has ended when it returns.
        """
        self._health.stop()
        self._http_api.stop()
        await self._http_api.leave_jobs()
        self._request_processor.close()
        if hands_over:
            self._dispatch_host.hand_over(stopping())
        idle = asyncio.Event()
        self._dispatch_host.when_idle(idle.set)
        try:
            async with asyncio.timeout(grace_s):
                await idle.wait()
        except TimeoutError:
            logger.info("%d requests did not end in time; they are ended", self._dispatch_host.dispatch.num_open)
        self._dispatch_host.close_all(stopping())
        await self._ports.stop(CLOSE_GRACE_S)
        await self._http_api.history.close()
        self._decode_worker.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._link_pool.stop()
        logging.getLogger(PACKAGE).removeHandler(self._recent_errors)

    @property
    def num_open(self) -> int:
        """Open requests, queued ones included."""
        return self._dispatch_host.dispatch.num_open

    def demands(self) -> tuple[ModelDemand, ...]:
        """The load of every model here, for who decides how many replicas it has."""
        return self._dispatch_host.demands()

    def check_integrity(self) -> None:
        """Asserts that the router's tables agree with each other."""
        self._dispatch_host.check_integrity()

    def version_counts(self) -> tuple[VersionCounts, ...]:
        """Outcomes of requests, by model and version."""
        return self._dispatch_host.dispatch.version_counts()

    def _dump(self) -> str:
        num_paused = self._request_processor.pauses.num_waiting
        errors = self._recent_errors.lines
        parts = self._dispatch_host, self.operator_state, self._config, self._limits, errors, num_paused
        return state_dump(*parts, self.overload, self._protection)

    def _all_warnings(self) -> tuple[str, ...]:
        parts = self.warnings, self._http_api.history.warnings, self.overload.warnings
        return *chain.from_iterable(parts), *self._certificates.warnings(time.time())

    async def _alone(self, change: Change) -> OperatorState:
        """Applies a change in a router without a cluster."""
        operator_state = change.applied_to(self.operator_state)
        await self._link_pool.apply(operator_state)
        return operator_state

    def _as_endpoint(self) -> RouterEndpoint | None:
        """This router as its own picker sees it; None while it serves no HTTP."""
        if not self.http_address or self._http_api.is_stopping:
            return None
        has_replicas = any(model.takes_requests for model in self._dispatch_host.dispatch.models())
        address = self.advertised_http_address or self.http_address
        return RouterEndpoint(address=address, num_open=self.num_open, has_replicas=has_replicas)

    def _see(self, view: DirectoryView) -> None:
        self.warnings = (FULL_DISKS.format(view.num_on_full_disks),) if view.num_on_full_disks else ()
        self.poison_watch.note(view.router_losses)
        if self._picker is not None:
            self._picker.set_routers(view.routers)

    def _pinned(self, model: str) -> tuple[Adapter, ...]:
        return tuple(one for one in self._request_processor.adapters.of(model) if one.pinned)

    def _apply(self, operator_state: OperatorState) -> None:
        self.operator_state = operator_state
        self._dispatch_host.set_operator_state(operator_state)
        self._request_processor.pauses.set(operator_state.pauses)
        self._request_processor.adapters.set(operator_state)
        if operator_state.log_level is not None:
            set_log_level(operator_state.log_level)

    def _publish_health(self) -> None:
        models = self._dispatch_host.dispatch.models()
        self._health.publish(models)
        if self._on_models is not None:
            self._on_models(models)
