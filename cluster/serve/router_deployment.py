"""Router as a Serve deployment, with its own ports. Serve keeps it alive.

Requests come through its ports; other deployments on the same Ray may call `generate` and `generate_stream` through a
Serve handle as well.
"""

import asyncio
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack
from urllib.parse import quote

from ray import serve
from ray.exceptions import RayError, RayTaskError

from holdfast.cluster.call_options import CallOptions
from holdfast.cluster.client.submissions import submission
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.cluster_control import ServeControl
from holdfast.cluster.serve.crash_journal import CrashJournals
from holdfast.cluster.serve.directory import Member, Role
from holdfast.cluster.serve.log_files import date_log_lines
from holdfast.cluster.serve.member_process import SCOPE, end_on_sigterm, end_when_out_of_memory, tracer_provider
from holdfast.cluster.serve.membership import (
    Lease,
    WatchedDirectory,
    cluster_security,
    has_other_routers,
    tell_demand,
)
from holdfast.cluster.serve.node_watch import DiskGuard
from holdfast.cluster.serve.placement_groups import reachable
from holdfast.cluster.serve.ray_internals import listen_on_the_node_alone, session_folder
from holdfast.cluster.serve.router_update import of_router
from holdfast.cluster.serve.security import ClusterSecurity, check_exposed
from holdfast.cluster.tokenizers import load_tokenizer
from holdfast.router.chat import Message
from holdfast.router.events import ModelStatus
from holdfast.router.generation import Generation, OutputDelta
from holdfast.router.operator_state import Change, OperatorState
from holdfast.router.request import GenerationRequest
from holdfast.router.server.router import SWITCH_INTERVAL_S, Router, RouterOptions
from holdfast.worker.errors import ConfigurationError, HoldfastError, InvalidRequestError, ReplicaError
from holdfast.worker.process_memory import set_aside
from holdfast.worker.replica.heartbeat_pipe import HeartbeatPipe
from holdfast.worker.replica.processes import OomScore, ProcessId, lower_oom_score
from holdfast.worker.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

ALL_END_S: Final = 0.5
"""Seconds between routers' leaving the directory where all routers end."""

TELL_EVERY_S: Final = 2.0
"""Seconds between a router's reports to the directory."""

LINK_S: Final = 10.0
"""Seconds that a router that replaces another may take to reach all replicas."""

LINK_CHECK_S: Final = 0.05
PORT_CHECK_S: Final = 0.2

STOP_S: Final = 5.0
"""Seconds that a router may take to end once it has nothing to wait for."""


class PortTakenError(ConfigurationError):
    """None of the ports can be listened on."""


class RouterDeployment:
    """Hosts one `Router`. Made and called by Serve alone."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: HoldfastConfig, host: str, directory: Any, *replicas: Any, replaces: bool = False
    ) -> None:
        """`replicas` are here only because Serve deploys what the ingress is given. `replaces`: another router may
        still have its port, and others go when this one is up.
        """
        listen_on_the_node_alone()
        date_log_lines(config.telemetry.log_format)
        self._journals: CrashJournals | None = None
        end_when_out_of_memory(self._note_no_memory)
        self._directory = directory
        self._drain_timeout_s = config.cluster.drain_timeout_s
        member_id = serve.get_replica_context().replica_tag
        self._lease = Lease(directory, Member(member_id=member_id, role=Role.ROUTER, settings=of_router(config)))
        self._router: Router | None = None
        self._tracing: TracerProvider | None = None
        self._heartbeat_pipe: HeartbeatPipe | None = None
        self._telling: list[asyncio.Task[None]] = []
        self._is_ending = False
        end_on_sigterm(self.__del__, limit_s=self._drain_timeout_s + STOP_S)
        try:
            security = await cluster_security(directory)
            self._tracing = tracer_provider(config.telemetry, "router", self._lease.member.member_id)
            tracer = None if self._tracing is None else self._tracing.get_tracer(SCOPE)
            watched = WatchedDirectory(directory)
            options: RouterOptions = {"on_models": self._say_linked, "send_change": self._send_change, "tracer": tracer}
            options["control"] = ServeControl(config)
            options["load_tokenizer"] = load_tokenizer
            options["before_opening"] = partial(self._begin_journal, namespace=config.cluster.namespace)
            start = partial(_start, config, host, watched, security, **options)
            self._router = await (_once_there_is_a_port(start, self._drain_timeout_s) if replaces else start())
        except ConfigurationError as error:
            self._lease.update(replace(self._lease.member, error=str(error)))
            await self._lease.flush()
            raise
        address, http_address = reachable(self._router.address), reachable(self._router.http_address)
        self._router.advertised_http_address = http_address
        self._picks = config.router.endpoint_picker
        if replaces:
            await self._until_linked()
        if self._is_ending:
            return
        lower_oom_score(OomScore.ROUTER, [ProcessId.of(os.getpid())])
        self._lease.update(replace(self._lease.member, phase="serving", address=address, http_address=http_address))
        demand = tell_demand(directory, self._lease.member.member_id, watched, self._router.demands)
        self._telling = [asyncio.create_task(work) for work in (demand, self._keep_telling(self._router))]
        if config.health.hangs_after_s is not None:
            self._heartbeat_pipe = HeartbeatPipe(config.health.hangs_after_s, [])
            self._router.overload.ledger.on_input = self._heartbeat_pipe.note_input
            self._beating = asyncio.create_task(self._heartbeat_pipe.keep_beating())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        set_aside()

    def _begin_journal(self, router: Router, namespace: str) -> None:
        """Begins the journal of the requests that this router reads, and reads the journals of routers that ended."""
        router.poison_watch.on_change = partial(self._tell_losses, router)
        if self._journals is not None:  # the router before it found no free port
            self._journals.serve(router.poison_watch)
            return
        try:
            self._journals = CrashJournals(
                session_folder() / "holdfast" / quote(namespace, safe=""), router.poison_watch
            )
        except OSError as error:
            logger.warning(
                "requests that end this router cannot be found, without a journal of the requests that it reads: %s",
                error,
            )
            return
        self._following = asyncio.create_task(self._journals.follow(), name="crash journals")

    def _tell_losses(self, router: Router) -> None:
        self._lease.update(replace(self._lease.member, router_losses=router.poison_watch.known_losses()))

    def _note_no_memory(self) -> None:
        if self._journals is not None:
            self._journals.own.note_no_memory()

    async def _until_linked(self) -> None:
        """Until it has reached every replica that serves, for so long at most: no request is to find it empty."""
        try:
            async with asyncio.timeout(LINK_S):
                while not self._is_ending and not await self._is_linked():
                    await asyncio.sleep(LINK_CHECK_S)
        except TimeoutError:
            logger.warning("this router serves, but has not reached every replica within %g s", LINK_S)

    async def _is_linked(self) -> bool:
        """Whether it has links to all replicas that the directory has now, except the ones lost meanwhile. False
        while the directory does not answer.
        """
        try:
            snapshot = await self._directory.watch.remote(0)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds while a directory is replaced
            logger.info("the directory did not answer: %r", error)
            return False
        wanted = Counter(one.model for one in snapshot.serving(Role.REPLICA))
        linked = dict(self._lease.member.linked)
        return all(linked.get(name, 0) >= number for name, number in wanted.items())

    def _say_linked(self, models: Sequence[ModelStatus]) -> None:
        """Reports the replicas that this router reaches to the directory, so that callers need not ask the router."""
        linked = tuple((model.name, model.num_replicas) for model in models)
        self._lease.update(replace(self._lease.member, linked=linked))

    async def _send_change(self, change: Change) -> OperatorState:
        """Sends a change to all routers. Raises `CallerError`, and `ReplicaError` if the directory does not answer."""
        try:
            operator_state: OperatorState = await self._directory.order.remote(change)
        except RayTaskError as error:
            if isinstance(error.cause, HoldfastError):
                raise error.cause from None
            raise
        except RayError as error:
            raise ReplicaError(f"the cluster's directory does not answer ({type(error).__name__})") from error
        return operator_state

    async def _keep_telling(self, router: Router) -> None:
        """Reports this router's operator state and its requests' outcomes by version to the directory."""
        guard = DiskGuard(session_folder(), logger.error)
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            is_disk_full = await asyncio.to_thread(guard.look)
            last, counts = self._lease.member, router.version_counts()
            num_open = router.num_open if self._picks else 0
            news = replace(
                last,
                operator_state=router.operator_state,
                counts=counts,
                is_disk_full=is_disk_full,
                num_open=num_open,
                router_losses=router.poison_watch.known_losses(),
            )
            if news != last:
                self._lease.update(news)

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        request_id: str = "",
        **options: Unpack[CallOptions],
    ) -> Generation:
        """All completions, when they have ended, for Serve handles. Takes and raises what `AsyncClient.generate` does,
        and `params` as a mapping as well.
        """
        request = called(prompt, params, messages, model=model, request_id=request_id, **options)
        return await self._started.in_process.generate(request)

    async def generate_stream(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        request_id: str = "",
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[OutputDelta, None]:
        """The completions as they come, for Serve handles with `stream=True`. Takes and raises what `generate` does."""
        request = called(prompt, params, messages, model=model, request_id=request_id, **options)
        async with aclosing(self._started.in_process.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    @property
    def _started(self) -> Router:
        assert self._router is not None, "Serve calls it once it is made"
        return self._router

    async def __del__(self) -> None:
        """Serve awaits this when the router is to end gracefully.

        If it ends alone, clients that come again take their streams elsewhere at once; others, and all where every
        router ends, have time for their open requests.
        """
        self._is_ending = True
        for telling in self._telling:  # none yet, if it still waits for its links: clients may have found its port
            telling.cancel()
        await self._lease.end()
        if self._router is None:  # SIGTERM has come before it was up
            return
        await asyncio.sleep(ALL_END_S)
        hands_over = await has_other_routers(self._directory, self._lease.member.member_id)
        await self._router.stop(self._drain_timeout_s, hands_over=hands_over)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.shutdown)
        if self._heartbeat_pipe is not None:
            self._heartbeat_pipe.cut()
        if self._journals is not None:
            self._journals.own.close()


def called(
    prompt: str | Sequence[int] | None,
    params: SamplingParams | Mapping[str, Any] | None,
    messages: Sequence[Message] | None,
    *,
    model: str,
    request_id: str,
    **options: Unpack[CallOptions],
) -> GenerationRequest:
    """The request of a call through a handle. Its caller does not come again, so it is let run where routers end."""
    chosen = sampling_params(params) if isinstance(params, Mapping) else params
    request = submission(prompt, chosen, messages, model=model, request_id=request_id, **options)
    return replace(request, attempt=0)


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Raises `InvalidRequestError` for a field that there is not."""
    for name, value in fields.items():
        if name not in SamplingParams.__dataclass_fields__:
            raise InvalidRequestError(f"sampling_params.{name}", value, "is not known")
    return SamplingParams(**fields)


async def _once_there_is_a_port(start: Callable[[], Awaitable[Router]], drain_timeout_s: float) -> Router:
    """Result of `start`, once a router that leaves has freed its port. Raises `PortTakenError` if none does."""
    limit_s = time.monotonic() + drain_timeout_s + 2 * STOP_S
    while True:
        try:
            return await start()
        except PortTakenError:
            if time.monotonic() > limit_s:
                raise
            await asyncio.sleep(PORT_CHECK_S)


async def _start(
    config: HoldfastConfig,
    host: str,
    directory: WatchedDirectory,
    security: ClusterSecurity,
    **options: Unpack[RouterOptions],
) -> Router:
    """On the first free port of a range with one port per router, since several routers may share a machine."""
    check_exposed(security.settings, host)
    options |= {"gate": security.gate, "tls": security.server_tls, "links": security.links}
    options |= {"overload": config.overload, "order": config.scheduler, "telemetry": config.telemetry}
    error = None
    for port, http_port, admin_port in config.cluster.router_ports:
        try:
            return await Router.start(
                config.router,
                config.limits,
                directory,
                host,
                port,
                http_port=http_port,
                admin_port=admin_port,
                **options,
            )
        except RuntimeError as taken:
            error = taken
    cluster = config.cluster
    raise PortTakenError(
        f"cluster.port = {cluster.port}, cluster.http_port = {cluster.http_port}: on {host} one of these ports "
        f"cannot be bound; it may be in use ({error})"
    )
