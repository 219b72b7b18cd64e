"""Replica as a Serve deployment: Serve decides where it runs and when it starts and ends; tokens bypass Serve.

The Serve replica's actor is the leader rank, in bundle 0 of its placement group. It serves the link on a separate port
and keeps a lease in the directory. When a rank dies, the whole replica ends: routers hear of it over the link at once,
and Serve starts another.
"""

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ray import serve

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.serve.directory import Member, Role
from holdfast.cluster.serve.log_files import date_log_lines
from holdfast.cluster.serve.member_process import (
    SCOPE,
    ProcessEnd,
    end_on_sigterm,
    end_when_out_of_memory,
    tracer_provider,
)
from holdfast.cluster.serve.membership import Lease, cluster_security, found
from holdfast.cluster.serve.metrics_api import MetricsApi, MetricsSettings
from holdfast.cluster.serve.node_watch import LOOK_EVERY_S, DiskGuard, MemoryWatch
from holdfast.cluster.serve.placement_groups import RayLauncher, Resources, reachable
from holdfast.cluster.serve.rank_placement import domains_of
from holdfast.cluster.serve.ray_internals import listen_on_the_node_alone, session_folder
from holdfast.cluster.serve.router_update import tokenizer_digest
from holdfast.cluster.serve.security import ClusterSecurity, check_exposed
from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import CallerError
from holdfast.worker.models.formats.gguf_folder import hf_folder
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.probe_loop import ProbeLoop
from holdfast.worker.replica.processes import OomScore, lower_oom_score
from holdfast.worker.replica.replica import Replica

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from holdfast.cluster.serve.engine_api import ApiSettings, EngineApi

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.5
"""Seconds that a failed replica may take to report before its process ends."""

STOP_S: Final = 10.0
"""Seconds that a replica may take to end its ranks once nothing runs."""

IDLE_CHECK_S: Final = 0.05


class ReplicaDeployment:
    """Hosts one `Replica`. Made and called by Serve alone."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: WorkerConfig,
        bundle: Resources,
        drain_timeout_s: float,
        directory: Any,
        api: "ApiSettings | None" = None,
        metrics: MetricsSettings | None = None,
        settings_text: str = "",
        domain_label: str | None = None,
        is_killable: bool = False,
    ) -> None:
        """`settings_text`: its reported settings (`router_update.py`)."""
        listen_on_the_node_alone()
        date_log_lines(config.telemetry.log_format)
        end_when_out_of_memory()
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        launcher = RayLauncher(bundle, config.parallel.tensor_parallel_size)
        if domain_label is not None:
            await asyncio.to_thread(_warn_of_domains, domain_label, launcher)
        handle = await found(directory)
        self._lease = Lease(handle, _starting(config, settings_text))
        self._server: LinkServer | None = None
        self._api: EngineApi | None = None
        self._metrics: MetricsApi | None = None
        self._tracing: TracerProvider | None = None
        self._probes: tuple[ProbeLoop, ...] = ()
        end_on_sigterm(self.__del__, limit_s=drain_timeout_s + STOP_S)
        try:
            security = await cluster_security(handle)
            for served in (api, metrics):
                if served is not None:
                    check_exposed(security.settings, served.host)
            self._tracing = tracer_provider(config.telemetry, "replica", _replica_id())
            self._replica = await asyncio.to_thread(Replica.start, located(config), launcher, self._report)
        except CallerError as error:
            self._say(error=str(error))
            await self._lease.flush()
            raise
        self._server = await self._linked(launcher.host, security, is_killable)
        if api is not None:
            self._api = await _opened(self._replica, api, config, security)
        if metrics is not None:
            self._metrics = await MetricsApi.start(self._replica, _replica_id(), metrics, security)
        await self._watch()
        await self._announce(self._server.address)

    async def _linked(self, host: str, security: ClusterSecurity, is_killable: bool) -> LinkServer:
        """The replica's end of the links to routers."""
        return await LinkServer.start(
            self._replica,
            replica_id=_replica_id(),
            host=host,
            security=security.links,
            tracer=None if self._tracing is None else self._tracing.get_tracer(SCOPE),
            on_kill=_kill_this_process if is_killable else None,
        )

    async def _watch(self) -> None:
        """Ends this process at a failure from now on, and reports a node whose disk is nearly full."""
        self._replica.on_failure(ProcessEnd(self._close_soon).because)
        lower_oom_score(OomScore.SERVING_REPLICA, self._replica.processes_here())  # the hang supervisor inherits it
        heartbeat_pipe = await asyncio.to_thread(self._replica.guard)
        self._beating = None if heartbeat_pipe is None else self._loop.create_task(heartbeat_pipe.keep_beating())
        guard, memory = DiskGuard(session_folder(), logger.error), MemoryWatch(logger.error)
        self._probes = (
            ProbeLoop("disk-guard", LOOK_EVERY_S, lambda: self._note_disk(guard.look())),
            ProbeLoop("memory-watch", LOOK_EVERY_S, memory.look),
        )
        for probe in self._probes:
            probe.start()

    async def _announce(self, address: str) -> None:
        """Registers the replica's model and address with the directory."""
        info = self._replica.info
        engine = "" if self._api is None else reachable(self._api.address)
        scraped = "" if self._metrics is None else reachable(self._metrics.address)
        self._say(
            phase="serving",
            address=address,
            engine_address=engine,
            metrics_address=scraped,
            model=info.model,
            model_path=info.path,
            adapters=info.adapters,
            version=info.version,
            tokenizer_digest=await asyncio.to_thread(tokenizer_digest, hf_folder(Path(info.path), info.model)),
        )

    def _note_disk(self, is_full: bool) -> None:
        """Notes the state of the disk, from a probe's thread."""
        if is_full != self._lease.member.is_disk_full:
            self._loop.call_soon_threadsafe(lambda: self._say(is_disk_full=is_full))

    async def check_health(self) -> None:
        """Raises once the engine has failed. Serve then replaces this replica."""
        if self._replica.engine.failure is not None:
            raise self._replica.engine.failure

    async def __del__(self) -> None:
        """Serve awaits this for a graceful end: the replica takes no new requests, lets running ones finish, and
        stops.
        """
        for probe in self._probes:
            probe.stop()
        await self._lease.end()
        if self._server is None:  # SIGTERM has come before it was up
            return
        self._replica.wind_down()
        if self._api is not None:
            self._api.wind_down()
        deadline_s = time.monotonic() + self._drain_timeout_s
        while self._is_busy() and time.monotonic() < deadline_s:
            await asyncio.sleep(IDLE_CHECK_S)
        await self._server.hand_pins_on(deadline_s - time.monotonic())
        await self._server.stop()
        if self._api is not None:
            await self._api.stop()
        if self._metrics is not None:
            await self._metrics.stop()
        await asyncio.to_thread(self._replica.stop)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.shutdown)

    def _is_busy(self) -> bool:
        engine = self._replica.engine
        return engine.failure is None and engine.load.num_running + engine.load.num_waiting > 0

    def _report(self, phase: str, done: int, total: int) -> None:
        """Reports the phase of the start, from the loading thread."""
        self._loop.call_soon_threadsafe(lambda: self._say(phase=phase, done=done, total=total))

    def _say(self, **changes: Any) -> None:
        self._lease.update(replace(self._lease.member, **changes))

    def _close_soon(self) -> None:
        """Closes links, from the thread that is about to end this process, which tells Serve."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(FLUSH_S)

    async def _close(self) -> None:
        """Tells every router, and the directory."""
        assert self._server is not None, "its failures are heard of once it serves"
        await self._server.stop()
        await self._lease.end()


def _kill_this_process() -> None:
    """Kills this process as a crash would: nothing is flushed, and no peer is notified."""
    os.kill(os.getpid(), signal.SIGKILL)


def _warn_of_domains(label: str, launcher: RayLauncher) -> None:
    domains = domains_of(label, launcher.node_ids())
    if len(domains) > 1:
        logger.warning("the ranks of this replica lie across domains of %s: %s", label, ", ".join(sorted(domains)))


async def _opened(replica: Replica, api: "ApiSettings", config: WorkerConfig, security: ClusterSecurity) -> "EngineApi":
    from holdfast.cluster.serve.engine_api import EngineApi  # its imports take time, and few callers need it

    return await EngineApi.start(replica, api, config.scheduler, security)


def _starting(config: WorkerConfig, settings_text: str) -> Member:
    return Member(
        member_id=_replica_id(),
        role=Role.REPLICA,
        model=config.model.name,
        application=serve.get_replica_context().app_name,
        settings=settings_text,
    )


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_tag)
