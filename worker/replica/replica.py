"""Replica: a tensor-parallel group, its engine, and the supervision of its ranks, in the leader's process."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from holdfast.worker.adapter import Adapter
from holdfast.worker.config import HealthConfig, WorkerConfig
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.tier_mover import TierShape
from holdfast.worker.errors import ConfigurationError, HoldfastError, ReplicaError
from holdfast.worker.executors.rendezvous import RankListener, Rendezvous
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.process_memory import loading, take_back
from holdfast.worker.progress import Report
from holdfast.worker.replica.gpu_stats import gpu_watch
from holdfast.worker.replica.heartbeat_pipe import HeartbeatPipe
from holdfast.worker.replica.known_answer import KnownAnswerCheck
from holdfast.worker.replica.probe_loop import Watchdog
from holdfast.worker.replica.processes import CoreWait, ProcessId
from holdfast.worker.replica.rank import (
    LocalLauncher,
    RankLauncher,
    Ranks,
    default_device,
    join,
    prepare_process,
    with_device,
)
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation
from holdfast.worker.scheduler.step_tuner import StepTuner
from holdfast.worker.step_plan import StepRunner
from holdfast.worker.wire.loopback import LOOPBACK, check_loopback

if TYPE_CHECKING:
    import torch

    from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
    from holdfast.worker.engine.rank_orders import RankMovers
    from holdfast.worker.executors.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _import_apart(module: str) -> None:
    """Imports a module on a separate thread. Torch keeps the stack of its first import, and with it all objects in its
    frames: a caller's `LLM` among them would never be freed.
    """
    if module not in sys.modules:
        with ThreadPoolExecutor(1, thread_name_prefix="import") as thread:
            thread.submit(import_module, module).result()


class Replica:
    """A model copy that answers requests through `engine`. Made by `start`; ended by `stop`, or by a failure."""

    end_limit_s: float = 5.0
    """After a rank was lost the engine ends by itself within this time, or is left behind."""

    def __init__(
        self,
        info: ModelInfo,
        engine: Engine,
        leader: "LeaderRunner",
        group: "TensorParallelGroup",
        ranks: Ranks | None,
        health: HealthConfig,
    ) -> None:
        self.info = info
        self.engine = engine
        self.health = health
        self.movers: RankMovers | None = None
        """Movers of blocks between the caches of all ranks and elsewhere; None: their bytes cannot be had."""
        self._watchdog = Watchdog(
            engine.progress,
            lambda: engine.has_work,
            self._condemn,
            frozen_after_s=health.frozen_after_s,
            core_wait=CoreWait(self.processes_here),
        )
        self._known_answer_check = KnownAnswerCheck(engine, info, engine.fail, every_s=health.self_check_every_s)
        self._leader = leader
        self._group = group
        self._ranks = ranks
        self._heartbeat_pipe: HeartbeatPipe | None = None
        self._stopping = False
        self._failure: HoldfastError | None = None
        self._callbacks: list[Callable[[HoldfastError], None]] = []
        self._lock = threading.Lock()

    @classmethod
    @loading()
    def start(
        cls, config: WorkerConfig, launcher: RankLauncher | None = None, progress: Report | None = None
    ) -> "Replica":
        """Starts the other ranks, loads this one's share of the model, checks it, and starts the engine. Blocking.

        Raises `UnsupportedModelError` or `ConfigurationError` where the settings cannot work, `ReplicaError` when a
        rank dies on the way. Nothing is left running then.
        """
        _import_apart("holdfast.worker.engine.model_runner")
        from holdfast.worker.engine.model_runner import ModelRunner

        device = default_device(config, rank=0)
        config = with_device(config, device)
        prepare_process(config, device)
        group, ranks = _gather_ranks(config, device, launcher or LocalLauncher())
        try:
            runner = ModelRunner.load(config, group, progress, device)
        except BaseException:  # an interrupt as well: no rank may be left running
            if ranks is not None:
                ranks.kill()
            group.close()
            raise
        return cls.around(config, runner, group, ranks)

    @classmethod
    def around(
        cls, config: WorkerConfig, runner: "ModelRunner", group: "TensorParallelGroup", ranks: Ranks | None = None
    ) -> "Replica":
        """A replica of a leading rank that is loaded and checked. Its engine runs when this returns.

        Raises `ReplicaError` when a rank dies on the way. Nothing is left running then.
        """
        from holdfast.worker.engine.model_runner import LeaderRunner

        info = runner.info
        batching = config.scheduler.for_whole_prompts() if info.computes_whole_prompts else config.scheduler
        speculation = Speculation(config.speculation, batching)
        scheduler = Scheduler(
            batching,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            prefix_caching=config.cache.enable_prefix_caching,
            num_state_slots=info.num_state_slots,
            state_blocks=info.state_blocks,
            window=info.window,
            drafter=speculation,
            pooling=None if info.pooling is None else info.pooling.kind,
            whole_prompts=info.computes_whole_prompts,
        )
        tuner = StepTuner(
            batching,
            block_size=info.block_size,
            num_speculative_tokens=speculation.num_speculative_tokens,
        )
        leader = LeaderRunner(runner, group)
        gpu = gpu_watch(default_device(config, rank=0))
        engine = Engine(
            scheduler,
            _stepping(config, leader),
            progress=runner.progress,
            tuner=tuner,
            gpu=gpu,
            num_scheduler_steps=config.scheduler.num_scheduler_steps,
        )
        if (orders := leader.adapter_orders()) is not None:
            engine.adapters.serve(config.model.max_loras, orders)
            engine.adapters.keep([one for one in info.adapters if one.pinned])
        replica = cls(info, engine, leader, group, ranks, config.health)
        replica.movers = leader.movers()
        if replica.movers is not None:
            _put_below(engine, scheduler, replica.movers, tuner, info)
        try:
            replica._begin()
        except BaseException:  # an interrupt as well
            replica.stop()
            raise
        return replica

    def on_failure(self, callback: Callable[[HoldfastError], None]) -> None:
        """Calls `callback` once when the replica has failed, from some thread; at once if it has already."""
        with self._lock:
            if self._failure is None:
                self._callbacks.append(callback)
                return
        callback(self._failure)

    def read_adapter(self, name: str, path: str, *, replaces: bool) -> Adapter:
        """The adapter that lies in a folder now, of which a request follows: it is loaded here, unless it replaces none
        and another waits for its request. Raises `ConfigurationError` where it cannot be read, or adapters are not
        served.
        """
        orders = self._leader.adapter_orders()
        if orders is None:
            raise ConfigurationError("model.enable_lora = False: this replica serves no adapters")
        return orders.own.load_ahead(name, path, replaces=replaces)

    def guard(self) -> HeartbeatPipe | None:
        """Starts a hang supervisor, which kills this process and its ranks if the process hangs as a whole; None if the
        settings want none. For hosts whose process is the replica's alone: they keep the heartbeat pipe beating until
        `stop`.
        """
        if self.health.hangs_after_s is None:
            return None
        _, *ranks = self.processes_here()
        self._heartbeat_pipe = HeartbeatPipe(self.health.hangs_after_s, ranks)
        return self._heartbeat_pipe

    def processes_here(self) -> list[ProcessId]:
        """The leader, which is this process, and those of its ranks that run on this machine."""
        ranks = [] if self._ranks is None else self._ranks.processes_here()
        return [ProcessId.of(os.getpid()), *ranks]

    def update_weights(self, folder: str, version: str, timeout_s: float | None = None) -> ModelInfo:
        """Takes the weights of another folder, as `ModelRunner.reload` does, between two steps. No request may be open.
        Blocking. Raises `ReplicaError` if the engine has ended.
        """
        assert not self._known_answer_check.has_answer, "its answer belongs to the weights of the start"
        self.info = self.engine.between_steps(lambda: self._reload(folder, version)).result(timeout_s)
        return self.info

    def _reload(self, folder: str, version: str) -> ModelInfo:
        try:
            info = self._leader.reload(folder, version)
        except ReplicaError as error:  # its ranks have different weights, or do different things
            self.engine.fail(error)
            raise
        self.engine.forget_cache()
        return info

    def wind_down(self) -> None:
        """Stops the known-answer check, so that the replica is idle without other requests."""
        self._known_answer_check.stop()

    def stop(self) -> None:
        """Aborts running requests, answers all listeners, writes staged blocks to the store, and ends the ranks and the
        hang supervisor. Safe to call twice.
        """
        if self._stopping:
            return
        self._stopping = True
        self._stop_watching()
        self.engine.stop()
        if self.movers is not None:
            self.movers.close()
        if self._ranks is not None:
            self._ranks.stop()
        try:
            self._group.close()
        except ReplicaError as error:
            logger.debug("leaving a group that is broken already: %s", error)
        if self._heartbeat_pipe is not None:
            self._heartbeat_pipe.cut()
        self._watchdog.join()
        self._known_answer_check.join()
        take_back()  # the caller's objects may be among the objects that were set aside

    def _begin(self) -> None:
        self.engine.on_end = self._fail
        self.engine.start()
        if self._ranks is not None:
            threading.Thread(target=self._watch, args=(self._ranks,), name="rank-watch", daemon=True).start()
        if self.info.row_invariant and self.health.self_check_every_s > 0:
            self._compare_answers()
        else:
            self._known_answer_check.stand_by()
        self._watchdog.start()

    def _compare_answers(self) -> None:
        """The first result's digest is part of the model info. The watchdog starts later: no step time is known yet."""
        digest = self._known_answer_check.begin()
        self.info = replace(self.info, answers_digest=digest)
        if digest:
            self._known_answer_check.start()

    def _watch(self, ranks: Ranks) -> None:
        """Any rank's death fails the whole replica at once: a group with a hole computes nothing.

        On GPUs the engine may wait for the lost rank for ever: then callers are answered here.
        """
        error = ReplicaError(f"the replica lost a rank: {ranks.wait()}")
        self.engine.fail(error)
        self._fail(error)
        if not self.engine.wait(self.end_limit_s):
            self.engine.give_up(error)

    def _condemn(self, still_s: float) -> None:
        """A frozen rank blocks all others and cannot be identified: the whole group is ended."""
        error = ReplicaError(f"the replica is frozen: no progress for {still_s:.1f} s while there is work")
        self._fail(error)
        self.engine.give_up(error)

    def _fail(self, error: HoldfastError) -> None:
        """Fails the replica, from the watches or the engine's thread, whichever notices first."""
        with self._lock:
            if self._stopping or self._failure is not None:
                return
            self._failure = error
        self._stop_watching()
        try:
            logger.error("%s", error)
            for callback in self._callbacks:
                callback(error)
        finally:  # whatever went wrong there: no rank outlives its replica
            if self._ranks is not None:
                self._ranks.kill()
            threading.Thread(target=self._group.abort, name="group-abort", daemon=True).start()  # it may hang itself

    def _stop_watching(self) -> None:
        self._watchdog.stop()
        self.wind_down()


def _put_below(engine: Engine, scheduler: Scheduler, movers: "RankMovers", tuner: StepTuner, info: ModelInfo) -> None:
    """Gives the cache its store, whose blocks are known when this returns."""
    import torch

    shape = TierShape(
        block_bytes=info.kv_bytes_per_token * info.block_size,
        state_bytes=info.state_bytes,
        num_threads=torch.get_num_threads(),
    )
    tier = BlockTier(
        *(*scheduler.caches, movers, shape, tuner.model.prefill_s, scheduler.num_awaited_blocks, scheduler.can_preempt),
        scheduler.pinning,
        has_store=movers.own.has_store,
    )
    movers.own.start(engine.tier.put_below(tier))


def _stepping(config: WorkerConfig, leader: "LeaderRunner") -> StepRunner:
    """Runner of the engine's steps: with two in flight if the device runs by itself and the settings allow."""
    from holdfast.worker.engine.steps_in_flight import DeviceRunner

    is_wanted = config.scheduler.async_scheduling is not False and config.cache.kv_offload_memory is None
    if is_wanted and leader.overlaps and not config.speculation.max_num_drafts:
        return DeviceRunner(leader)
    return leader


def _gather_ranks(
    config: WorkerConfig, device: "torch.device", launcher: RankLauncher
) -> "tuple[TensorParallelGroup, Ranks | None]":
    """The leader's end of the group, and the other ranks if there are any."""
    from holdfast.worker.executors.tensor_parallel import SingleRank

    if config.parallel.tensor_parallel_size == 1:
        return SingleRank(), None
    from holdfast.worker.models.loading import check_ranks

    check_ranks(config)
    host = launcher.meeting_host
    if host == LOOPBACK:
        check_loopback(host)
    with RankListener(host) as listener:  # before any rank is started, so that no other process takes the port
        rendezvous = Rendezvous.at(host, listener.port)
        ranks = launcher.launch(config, rendezvous)
        try:
            return _first(lambda: join(config, 0, rendezvous, device, listener), ranks.wait), ranks
        except BaseException:  # an interrupt as well
            ranks.kill()
            raise


def _first(joining: Callable[[], T], dying: Callable[[], str]) -> T:
    """Result of `joining`, unless `dying` returns before: then a `ReplicaError` with its text.

    Both run on daemon threads: a thread that is still blocked at the end must not keep the process alive.
    """
    outcome: Future[T] = Future()

    def join_group() -> None:
        try:
            group = joining()
        except BaseException as error:  # noqa: BLE001 - raised again where the outcome is asked for
            with suppress(InvalidStateError):
                outcome.set_exception(error)
        else:
            with suppress(InvalidStateError):
                outcome.set_result(group)

    def watch() -> None:
        news = dying()
        with suppress(InvalidStateError):
            outcome.set_exception(ReplicaError(f"a rank ended while the group was meeting: {news}"))

    for target in (join_group, watch):
        threading.Thread(target=target, daemon=True).start()
    return outcome.result()
