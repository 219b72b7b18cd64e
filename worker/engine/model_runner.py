"""Model runner of one rank: runs steps, as the leader or as a follower, and the self-check before the first request."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar, cast

import numpy as np
import torch

from holdfast.worker.config import WorkerConfig
from holdfast.worker.engine.adapters import AdapterOrders, RankAdapters
from holdfast.worker.engine.grammar_masks import GrammarMasks, WaitedMasks
from holdfast.worker.engine.rank_orders import (
    ADAPTER_ORDERS,
    BLOCK_ORDERS,
    Order,
    RankMover,
    RankMovers,
    can_transfer,
    number_message,
    read_reload,
    reload_message,
)
from holdfast.worker.engine.self_check import Outcome, SelfCheck, lead_check
from holdfast.worker.engine.steps_in_flight import (
    LaunchedStep,
    dead_ends,
    fitting,
    prompts_of,
    sampled_result,
    step_result,
)
from holdfast.worker.errors import CallerError, ConfigurationError, ReplicaError, UnsupportedModelError
from holdfast.worker.executors.mapped_files import trim_heap
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import ChosenLogprobs, HeadOutput, OverlappingSampler, StepSampler
from holdfast.worker.executors.tensor_parallel import Message, TensorParallelGroup
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.models.adapter_places import AdapterPlaces
from holdfast.worker.models.adapter_tables import OwnTables
from holdfast.worker.models.backend import BlockCache
from holdfast.worker.models.checks import first_line
from holdfast.worker.models.executor_protocols import AdaptingExecutor, OverlappingExecutor
from holdfast.worker.models.loading import LoadedModel, check_same_model, load_model, reloaded_config
from holdfast.worker.models.memory import WAYS_OUT, is_failed_allocation, memory_left
from holdfast.worker.models.model import choose_device
from holdfast.worker.models.native_backend import NativeBackend
from holdfast.worker.models.next_token import NextTokenLayer
from holdfast.worker.models.stated_layout import stated_config_of
from holdfast.worker.models.weights import model_folder
from holdfast.worker.process_memory import readable_bytes
from holdfast.worker.progress import ProgressCounter, Report
from holdfast.worker.step_plan import StepPlan, StepResult, draws_of, plain_draws_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ModelRunner:
    """One rank of a loaded model. Used by one thread at a time."""

    def __init__(
        self, loaded: LoadedModel, config: WorkerConfig, group: TensorParallelGroup, device: torch.device
    ) -> None:
        self.info: ModelInfo = loaded.info
        """The same on all ranks."""
        self.backend = loaded.backend
        self.draft = loaded.draft
        self.pooler = loaded.pooler
        self.progress: ProgressCounter = loaded.backend.progress
        """Moves with every layer of every step."""
        self._config = config
        self._group = group
        self._device = device
        self._entered_by: int | None = None
        self.adapters: RankAdapters | None = None
        """Loads adapters, where they are served."""
        self.mover: RankMover | None = None
        """Copies blocks to the store below the cache and back, where there is one."""

    @classmethod
    def load(
        cls,
        config: WorkerConfig,
        group: TensorParallelGroup,
        progress: Report | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """Loads this rank's share of the model and checks it. All ranks of the group call this together; blocking.

        Raises `ConfigurationError` or `UnsupportedModelError`, on every rank, where the model cannot be served so.
        """
        progress = progress or _silent
        device = device or choose_device(config.model)
        try:
            loaded = load_model(config, group, device, progress)
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_failed_allocation(error):
                raise
            raise ConfigurationError(
                f"model.model = {config.model.model!r}: out of memory while it was loaded ({first_line(error)}); "
                f"{readable_bytes(memory_left(device))} of memory are left; {WAYS_OUT}"
            ) from error
        runner = cls(loaded, config, group, device)
        progress("check", 0, 1)
        row_invariant = _self_check(runner, group, loaded.cache)
        loaded.backend.warm_up(config.scheduler.max_num_seqs)
        trim_heap()
        progress("check", 1, 1)
        if not row_invariant:
            logger.warning("on this machine a token's last bits depend on its batch: replays may differ")
        runner.info = replace(loaded.info, row_invariant=row_invariant)
        if config.model.serves_adapters:
            runner.adapters = RankAdapters(*runner._adapter_parts(), group)
            named = runner.adapters.load_named(config.model.lora, config.model.pinned_loras)
            runner.info = replace(runner.info, adapters=named, max_loras=config.model.max_loras)
        memory = loaded.backend.block_memory() if isinstance(loaded.backend, NativeBackend) else None
        runner.mover = RankMover.of(config, runner.info, memory, group)
        on_host = memory is not None and not memory.is_on_device
        transfers = runner.mover is not None and on_host and can_transfer(config, runner.info)
        runner.info = replace(runner.info, transfers_blocks=transfers)
        if runner.mover is not None and group.rank > 0:
            runner.mover.start()
        return runner

    def _adapter_parts(self) -> tuple[Callable[[], AdaptingExecutor], AdapterPlaces]:
        """The executor that adapters are packed for, and their places. Raises `ConfigurationError` if there is none."""
        backend, config = self.backend, self._config.model
        executor = backend.executor if isinstance(backend, NativeBackend) else None
        if not isinstance(executor, AdaptingExecutor):
            raise ConfigurationError(
                "model.enable_lora = True: adapters are served by the native backend alone, and this model runs on the "
                "HF backend"
            )
        executor.allocate_adapters(config.max_loras)
        folder = model_folder(config)
        stated = stated_config_of(config, folder)

        def current() -> AdaptingExecutor:
            assert isinstance(self.backend, NativeBackend)
            assert isinstance(self.backend.executor, AdaptingExecutor)
            return self.backend.executor

        return current, AdapterPlaces(stated, self._group, OwnTables(config, stated, folder))

    def reload(self, folder: str, version: str) -> None:
        """Takes the weights of another folder, of a model that differs from this one only in its weights. All ranks
        call this together, between two steps; the cache's content is lost. For as long as it takes there are two
        models.

        Raises `ConfigurationError` or `UnsupportedModelError` on every rank where that is not possible; then nothing
        has changed. Raises `ReplicaError` where it is possible on some ranks alone: the replica is to end.
        """
        config = self._agreed(lambda: reloaded_config(self._config, self.info, folder))
        fresh = self._agreed(
            lambda: ModelRunner.load(config, self._group, lambda *_: self.progress.tick(), self._device)
        )
        try:
            self._agreed(lambda: check_same_model(self.info, fresh.info))
        except ConfigurationError:
            fresh.close()
            raise
        if isinstance(self.draft, NextTokenLayer):  # it belongs to the weights, and has their head
            self.draft.close()
            self.draft = fresh.draft
        old, self.backend, self.pooler = self.backend, fresh.backend, fresh.pooler
        if self.mover is not None and fresh.mover is not None:
            self.mover.hand_over_to(fresh.mover)
            self.mover = fresh.mover
        self.info = replace(
            fresh.info,
            path=self.info.path,
            weights_version=version,
            adapters=self.info.adapters,
            max_loras=self.info.max_loras,
        )
        self.progress.follow(lambda: fresh.backend.progress.count)
        old.close()

    def _agreed(self, stage: Callable[[], _T]) -> _T:
        """The result of `stage`, which has no effect on another. Raises its error if it failed on every rank, and
        `ReplicaError` if it failed on some: the ranks would differ in their next steps.
        """
        error: Exception | None = None
        try:
            result = stage()
        except ReplicaError:
            raise
        except Exception as failure:  # noqa: BLE001 - whatever it is, the others hear that there is one
            error = failure
        failed = self._group.all_gather(torch.tensor([error is not None], dtype=torch.uint8)).tolist()
        if error is not None and all(failed):
            raise error
        if any(failed):
            ranks = ", ".join(str(rank) for rank, one in enumerate(failed) if one)
            reason = f": {error}" if error is not None else ""
            raise ReplicaError(f"new weights were refused on rank {ranks} of {len(failed)} alone{reason}") from error
        return result

    @property
    def sampler(self) -> StepSampler:
        """Reads this rank's logits, if it is the leader."""
        return self.backend.sampler

    def execute(self, batch: StepBatch) -> HeadOutput:
        """Runs one step. The leader's result counts."""
        if self._device.index is not None:
            self.enter_device()
        return self.backend.run(batch, with_logits=batch.with_logits)

    def take_part(self, batch: StepBatch) -> None:
        """Runs this rank's share of a step; a device that runs steps by itself is only given it."""
        self.enter_device()
        if (device := self.backend.overlapping) is not None:
            device.launch(batch, with_logits=batch.with_logits)
        else:
            self.backend.run(batch, with_logits=batch.with_logits)

    @property
    def overlapping(self) -> OverlappingExecutor | None:
        """Executor that runs two steps at a time, if the device does."""
        return self.backend.overlapping

    def enter_device(self) -> None:
        """CUDA's current device belongs to a thread, and a model is loaded on another one than its steps run on."""
        thread = threading.get_ident()
        if self._device.index is not None and thread != self._entered_by:
            torch.cuda.set_device(self._device)
            self._entered_by = thread

    def close(self) -> None:
        """Frees the backend's memory. Nothing is run after it."""
        if self.mover is not None:
            self.mover.close()
        self.backend.close()


class LeaderRunner:
    """Runs plans on all ranks of a replica, for the engine."""

    def __init__(self, runner: ModelRunner, group: TensorParallelGroup) -> None:
        self._runner = runner
        self._group = group
        self._grammars = GrammarMasks(runner.info.path, runner.info.eos_token_ids)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step everywhere and draws. Raises `ReplicaError` if a rank is lost."""
        drafts: tuple[tuple[int, ...], ...] = ()
        if self._runner.draft is not None:
            drafts = self._runner.draft.guess(plan)
            plan = plan.with_drafts(drafts)
        waiting = self._grammars.start(plan) if plan.has_grammars else None
        output = self._runner.execute(self._ordered(plan))
        if isinstance(self._runner.draft, NextTokenLayer):
            self._runner.draft.take(plan)
        self._runner.progress.tick()
        masks = None if waiting is None else self._masks(waiting)
        result = self._pooled(step_result(plan, output, self._runner.sampler, masks), plan, output)
        return replace(result, drafts=drafts) if drafts else result

    def _pooled(self, result: StepResult, plan: StepPlan, output: HeadOutput) -> StepResult:
        """The result with the sums and vectors of a step that pools."""
        if not plan.pools or self._runner.pooler is None:
            return result
        return replace(result, pooled=self._runner.pooler.pooled(plan, output.pooled))

    @property
    def runs_several_steps(self) -> bool:
        """Whether a plan may be for several steps."""
        executor = self._runner.backend.multi_step
        return executor is not None and executor.runs_several_steps and self._runner.draft is None

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched before the one before it is collected."""
        return self._runner.overlapping is not None and self._runner.draft is None

    def launch(self, plan: StepPlan, before: StepPlan | None) -> LaunchedStep:
        """Starts one step everywhere, and its draws. `before` is the plan of the step before, if that one is in flight.

        Waits only for the masks of grammars, while the device is busy.
        """
        waiting = self._grammars.start(plan)
        batch = self._ordered(plan, before)
        executor = self._overlapping()
        launched = executor.launch(batch, with_logits=batch.with_logits)
        logits = executor.logits_to_draw_from(launched)
        if logits is None:
            return LaunchedStep(plan, launched, None)
        masks = None if waiting is None else self._masks(waiting)
        sampler = cast(OverlappingSampler, self._runner.sampler)
        draws = draws_of(plan)
        chosen = ChosenLogprobs.of(logits, draws)  # the next step writes over the logits
        drawing = sampler.launch(logits, draws, fitting(masks), prompts_of(plan))
        return LaunchedStep(plan, launched, drawing, dead_ends(masks), chosen)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Result of the oldest launched step."""
        if step.drawing is not None:
            sampler = cast(OverlappingSampler, self._runner.sampler)
            result = sampled_result(step.plan, sampler.collect(step.drawing), step.dead_ends, step.chosen)
        else:
            output = self._overlapping().collect(step.launched)
            result = self._pooled(step_result(step.plan, output, self._runner.sampler), step.plan, output)
        self._runner.progress.tick()
        return result

    def _overlapping(self) -> OverlappingExecutor:
        self._runner.enter_device()
        overlapping = self._runner.overlapping
        assert overlapping is not None, "the device runs steps in turn"
        return overlapping

    def logits(self, plan: StepPlan) -> np.ndarray:
        """Runs one step everywhere; a copy of the logits, float32 [rows wanted, vocab], in main memory."""
        batch = StepBatch.of(plan)
        if self._group.size > 1:
            self._group.broadcast(batch.packed())
        logits = self._runner.execute(batch).logits
        assert logits is not None, "rank 0 is the leader"
        return logits.cpu().numpy().copy()

    def _ordered(self, plan: StepPlan, before: StepPlan | None = None) -> StepBatch:
        """A step that was sent to the other ranks. The device may draw in place of giving logits."""
        batch = StepBatch.of(plan, with_logits=plan.needs_logits, before=before)
        if self._group.size > 1:
            self._group.broadcast(batch.packed())
        batch.draws = partial(plain_draws_of, plan)
        return batch

    def _masks(self, waiting: WaitedMasks) -> dict[int, bytes]:
        """Waiting for masks counts as progress: a slow grammar does not end a replica."""
        return self._grammars.collect(waiting, self._runner.progress.tick)

    def reload(self, folder: str, version: str) -> ModelInfo:
        """Like `ModelRunner.reload`, on all ranks. Returns the facts of the new weights."""
        self._group.broadcast(reload_message(folder, version))
        self._runner.reload(folder, version)
        return self._runner.info

    def movers(self) -> RankMovers | None:
        """Movers that copy blocks of all ranks to the store below the cache and back, if there is one."""
        runner = self._runner
        return None if runner.mover is None else RankMovers(lambda: runner.mover, self._group)

    def adapter_orders(self) -> AdapterOrders | None:
        """Orders to load adapters on all ranks, where they are served."""
        adapters = self._runner.adapters
        return None if adapters is None else AdapterOrders(adapters, self._group)

    def keep_alive(self) -> None:
        """Tells idle followers that the leader is alive."""
        self._group.broadcast(number_message(Order.KEEP_ALIVE))

    def close(self) -> None:
        """Tells the followers to stop."""
        self._grammars.close()
        self._group.broadcast(number_message(Order.STOP))


def follow(runner: ModelRunner, group: TensorParallelGroup) -> None:
    """Runs the steps that the leader orders, until it says stop. Raises `ReplicaError` if the leader is lost."""
    while (message := group.broadcast(None))[0] != Order.STOP:
        if message[0] == Order.RELOAD:
            _follow_reload(runner, message)
        elif message[0] in BLOCK_ORDERS and runner.mover is not None:
            runner.mover.carry_out(message)
        elif message[0] in ADAPTER_ORDERS and runner.adapters is not None:
            runner.adapters.carry_out(message)
        elif message[0] != Order.KEEP_ALIVE:
            runner.take_part(StepBatch.unpack(message))


def _follow_reload(runner: ModelRunner, message: Message) -> None:
    try:
        runner.reload(*read_reload(message))
    except CallerError as error:  # all ranks refuse it, and the leader tells the caller
        logger.info("the new weights were refused: %s", error)


def _self_check(runner: ModelRunner, group: TensorParallelGroup, cache: BlockCache) -> bool:
    """Whether rows are invariant, bit for bit. The leader runs the check, the others follow; the cache ends clean.

    Raises `UnsupportedModelError` on every rank if the model mixes tokens outside attention.
    """
    leader = LeaderRunner(runner, group)
    check = SelfCheck(runner.info, leader.logits)
    if group.rank > 0:
        follow(runner, group)
        outcome = Outcome(group.broadcast(None)[0])
        if outcome is Outcome.REFUSED:
            raise UnsupportedModelError(runner.info.model_type, "the leader's check refused it", "See its message")
    else:
        outcome = lead_check(check, leader.close, group)
    cache.clear(torch.tensor(check.block_ids))
    return outcome is Outcome.BITS_EQUAL


def _silent(phase: str, done: int, total: int) -> None:
    pass
