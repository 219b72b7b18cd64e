"""Engine: the thread that plans, runs and commits one step after another and delivers the updates.

    submit, abort ──► inbox ──► core ─► plan ─► launch ─► collect ─► commit ──► listener.on_update
                                  └─────────────── one turn ───────────────┘

A runner that overlaps steps has the next one launched before the first is collected. Then a turn plans and launches a
step, and collects and commits the one before it, while the device runs on.

Whichever way the loop ends, every request that was submitted has been answered.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from holdfast.worker.engine.adapter_access import AdapterAccess
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.inbox import Inbox
from holdfast.worker.engine.request_guards import NumbersCheck
from holdfast.worker.engine.steps_in_flight import RunLength, StepsInFlight
from holdfast.worker.engine.tier_access import TierAccess
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.request import EngineLoad, EngineRequest
from holdfast.worker.scheduler.batching_optimizer import Recommendation
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.step_tuner import StepTuner
from holdfast.worker.step_plan import StepPlan, StepRunner
from holdfast.worker.step_update import EngineStats, GpuStats, StepListener

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

GPU_EVERY_S = 2.0
"""Seconds between GPU measurements of a busy engine: a driver call takes longer than planning a step."""


HELD_LOOK_S: Final = 0.1
"""Seconds between two signs of life while requests wait for blocks, or for an adapter, and nothing runs."""

STOP_LIMIT_S: Final = 30.0
"""Seconds that `stop` waits for the step now running."""


class Engine:
    """A scheduler and a runner on a separate thread. All methods are safe to call from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        progress: ProgressCounter | None = None,
        tuner: StepTuner | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "engine",
        idle_s: float = 10.0,
        gpu: Callable[[], GpuStats] | None = None,
        num_scheduler_steps: int = 1,
    ) -> None:
        """`runner` has two steps in flight if it is an `OverlappingRunner`. `progress` is the counter that it moves
        inside a step, if it does. `tuner` watches the steps and sets their limits where tuning is on; `clock` gives
        seconds. `gpu` measures the GPU, if there is one. Decodes may take up to `num_scheduler_steps` steps on one
        plan, if the runner runs several.
        """
        self.progress = progress or ProgressCounter()
        self.progress.clock = clock
        self._core = EngineCore(scheduler)
        self._runner = runner
        self._steps = StepsInFlight(runner, self.progress, clock)
        self._run_length = RunLength(runner, num_scheduler_steps)
        self._tuner = tuner
        self._clock = clock
        self._idle_s = idle_s
        self._inbox = Inbox()
        self.tier = TierAccess(self._core, self._inbox, clock)
        """Blocks below the cache and in other replicas, for the replica around the engine."""
        self.adapters = AdapterAccess(self._core, self._inbox, self._land, clock)
        """Adapters, for the same."""
        self._gpu = gpu
        self._gpu_due_s = -math.inf
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.on_end: Callable[[HoldfastError], None] | None = None
        """Called once with the reason when the engine ends, before its listeners are notified. Set before `start`."""
        self._has_started = False
        self._starting = threading.Lock()
        """Lock of the start, and of an end before it."""

    # --- for any thread ---

    def start(self) -> None:
        """Once. Raises why the engine has ended, if it was ended before."""
        with self._starting:
            if (ended_by := self._inbox.closed_by) is not None:
                raise ended_by
            self._has_started = True
            self._thread.start()

    def stop(self, timeout_s: float = STOP_LIMIT_S) -> None:
        """Aborts running requests, answers all listeners and joins the thread. Safe to call twice.

        A thread that does not end, such as one that waits for a device whose peer has died, is abandoned after
        `timeout_s`; all listeners are then answered on this thread.
        """
        if self._ends_before_start(ReplicaError("the replica was stopped before it was started")):
            return
        self._inbox.put_unless_closed(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.error("the engine did not end within %.0f s, and is left behind", timeout_s)
                self.give_up(ReplicaError(f"the engine did not end within {timeout_s:.0f} s"))

    def wait(self, timeout_s: float) -> bool:
        """Whether the engine has ended within `timeout_s` seconds. One that was not started ends with `stop`."""
        if not self._has_started:
            return self._inbox.closed_by is not None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def attach(self, listener: StepListener) -> None:
        """Sends `listener` an update after every step from now on. Raises `ReplicaError` if the engine has ended."""
        self._inbox.put(lambda: self._core.attach(listener))

    def check_numbers_by(self, check: NumbersCheck) -> None:
        """`check`, a listener, is asked where logits are not finite for request after request; it is to call `settle`
        or `fail`.
        """
        self._core.numbers_check = check

    def settle(self) -> None:
        """The replica is well: requests that had no finite logits fail."""
        self._inbox.put_unless_closed(self._core.settle)

    def follow_cache(self, listener: StepListener) -> None:
        """Adds the content of the prefix cache to an attached listener's updates: all of it, then changes.

        Nothing is kept for this as long as no listener follows the cache.
        """
        self._inbox.put_unless_closed(lambda: self._core.follow_cache(listener))

    def detach(self, listener: StepListener) -> None:
        """`listener` gets no further updates, and its requests are aborted."""
        self._inbox.put_unless_closed(lambda: self._core.detach(listener))

    def submit(self, request: EngineRequest, listener: StepListener, attempt: Hashable = None) -> None:
        """Queues a request of an attached listener, to be known by the key `attempt`, or else by its own id. Raises
        `ReplicaError` if the engine has ended.
        """
        self._inbox.put(lambda: self._core.submit(request, listener, self._clock(), attempt))

    def fetch_ahead(
        self, request: EngineRequest, listener: StepListener | None = None, attempt: Hashable = None
    ) -> None:
        """Fetches blocks from the source of a request that comes later. The listener then gets `attempt`."""
        self._inbox.put_unless_closed(lambda: self._core.fetch_ahead(request, self._clock(), listener, attempt))

    def abort(self, attempt: Hashable) -> None:
        """Ends a request within one step; its last delta then says `ABORT`. Unknown keys are ignored."""
        self._inbox.put_unless_closed(lambda: self._core.abort(attempt))

    def fail(self, error: HoldfastError) -> None:
        """Ends the engine from outside, as when a rank has died while nothing was running."""
        if not self._ends_before_start(error):
            self._inbox.put_unless_closed(lambda: _raise(error))

    def give_up(self, error: HoldfastError) -> None:
        """Ends a frozen engine: reports the end to every listener on the calling thread, because the engine's thread
        may never return.
        """
        if self._ends_before_start(error):
            return
        if self._inbox.close(error):
            self._stopping = True
            self._tell_of_end(error)

    def _ends_before_start(self, error: HoldfastError) -> bool:
        """Whether the engine has no thread: then it ends on this one, and everyone is answered."""
        with self._starting:
            if self._has_started:
                return False
            if self._inbox.closed_by is None:
                self._end(error)
            return True

    def stats(self, timeout_s: float = 30.0) -> EngineStats:
        """Exact counts between two steps. Raises `ReplicaError` if the engine has ended."""
        future: Future[EngineStats] = Future()
        self._inbox.put(lambda: future.set_result(self._core.scheduler.stats()))
        return future.result(timeout_s)

    def recommendations(self, timeout_s: float = 30.0) -> list[Recommendation]:
        """Settings that the tuner would change. Raises `ReplicaError` if the engine has ended."""
        future: Future[list[Recommendation]] = Future()
        self._inbox.put(lambda: future.set_result(self._tuner.get_recommendations() if self._tuner else []))
        return future.result(timeout_s)

    def between_steps(self, action: Callable[[], Result]) -> "Future[Result]":
        """Runs `action` on the engine's thread, while no step is in flight. The future has the result or the error; if
        the engine ends before, the reason. A caller may cancel it. Raises `ReplicaError` if the engine has ended.
        """
        future: Future[Result] = Future()
        self._inbox.put(lambda: self._settle(future, action))
        return future

    def forget_cache(self) -> None:
        """Empties the prefix cache. On the engine's thread only, while no request is open."""
        self._core.forget_cache()

    def now(self) -> float:
        """The engine's clock, in seconds."""
        return self._clock()

    @property
    def load(self) -> EngineLoad:
        """Load after the last step."""
        return self._core.load

    @property
    def reported_stats(self) -> EngineStats:
        """The load as last reported to listeners, from one of the last steps. Does not block."""
        return self._core.reported_stats

    @property
    def has_work(self) -> bool:
        """Whether anything waits to be done. While it does, `progress` should move."""
        waits = self._core.scheduler.has_work or bool(self._core.held) or not self._inbox.is_empty
        return self._inbox.closed_by is None and waits

    @property
    def failure(self) -> HoldfastError | None:
        """Why the engine has ended, or None while it runs."""
        return self._inbox.closed_by

    # --- on the engine's thread ---

    def _run(self) -> None:
        error: HoldfastError = ReplicaError("the replica was stopped")
        try:
            while not self._stopping:
                self._take_commands()
                self._turn()
            self._land()
        except HoldfastError as failure:
            error = failure
        except Exception as bug:
            logger.exception("the engine failed")
            error = ReplicaError(f"the replica failed: {type(bug).__name__}: {bug}")
            error.__cause__ = bug
        finally:
            self._end(error)

    def _take_commands(self) -> None:
        """Runs all commands in the inbox; with nothing to do, waits for the first command."""
        core, wait_s = self._core, 0.0
        if not core.scheduler.has_work:
            wait_s = core.most_idle_s(self._clock(), self._idle_s)
            if (core.held.for_blocks or core.adapters is not None) and core.held:
                self.progress.tick()  # who waits sees that this thread does not stand still
                wait_s = min(wait_s, HELD_LOOK_S)
        commands = self._inbox.take(wait_s)
        if wait_s and not commands:
            self._runner.keep_alive()
        while commands:
            for command in commands:
                command()
            if core.scheduler.has_full_step:
                break  # a burst goes on while its first step runs
            commands = self._inbox.take()  # commands may have put others in: an adapter is here already
        tier = self._core.tier
        if tier is not None and (tier.has_store or tier.moves) and not self._core.scheduler.has_work:
            self._core.tend_tier(self._clock())

    def _turn(self) -> None:
        began_s = self._clock()
        if not self._stopping:
            self._launch_steps(began_s)
        if self._stopping or not self._steps.plans:
            self._deliver()
            return
        launched_s = self._clock()
        plan, result, step_s = self._steps.collect()
        collected_s = self._clock()
        num_gained = self._core.commit(plan, result, step_s)
        self._deliver()
        if (tier := self._core.tier) is not None and (tier.has_store or tier.moves):
            busy_s = step_s if self._core.scheduler.has_work else None  # else this thread waits for a command next
            if self._core.tend_tier(self._clock(), busy_s):
                self._deliver()
        ended_s, num_steps = self._clock(), plan.num_steps
        self._core.note_turn(launched_s - began_s, collected_s - launched_s, ended_s - collected_s, num_steps)
        self._run_length.observe(plan, step_s)
        if self._gpu is not None and ended_s >= self._gpu_due_s:
            self._gpu_due_s = ended_s + GPU_EVERY_S
            self._core.scheduler.counts.note_gpu(self._gpu())
        if self._tuner is not None:
            turn_s, num_gained = (ended_s - began_s) / num_steps, num_gained // num_steps
            self._tune(self._tuner, plan.with_drafts(result.drafts) if result.drafts else plan, turn_s, num_gained)

    def _launch_steps(self, now: float) -> None:
        """Plans and launches steps as far as the runner accepts them now: one step if it has none, and the following
        one if the runner and the scheduler can continue before its result.
        """
        scheduler = self._core.scheduler
        if not self._steps.plans and (plan := scheduler.plan(now, self._run_length.max_steps)) is not None:
            self._launch(plan)
        if self._steps.overlaps and self._steps.can_go_ahead() and (plan := scheduler.plan_ahead(now)) is not None:
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        if self._core.suspects.has_news:
            self._deliver()
        self._steps.launch(plan)

    def _land(self) -> None:
        """Takes in the steps that are in flight. Their tokens are delivered next time."""
        while self._steps.plans:
            self._core.commit(*self._steps.collect())

    def _tune(self, tuner: StepTuner, plan: StepPlan, turn_s: float, num_gained: int) -> None:
        """Tunes by the time of the whole turn, or one step's part of it, because a stream waits for that."""
        news = tuner.observe(plan, step_s=turn_s, num_gained=num_gained, num_waiting=self._core.load.num_waiting)
        for recommendation in news:
            logger.info("%s", recommendation)
        if tuner.acts:
            self._core.scheduler.policy.limits = tuner.next_limits()

    def _deliver(self) -> None:
        if self._inbox.closed_by is not None:
            return  # it was given up meanwhile, and all listeners have been notified
        for listener, update in self._core.take_updates():
            try:
                listener.on_update(update)
            except Exception:  # a listener that breaks loses its own requests, not everybody's
                logger.exception("a listener failed; its requests are aborted")
                self._core.detach(listener)

    def _settle(self, future: "Future[Result]", action: Callable[[], Result]) -> None:
        if not future.set_running_or_notify_cancel():
            return  # the caller waits no longer
        if not self._stopping:
            try:
                self._land()
            except BaseException as error:
                future.set_exception(error)
                raise
        try:
            if self._stopping:
                raise self._inbox.closed_by or ReplicaError("the replica was stopped")
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            future.set_exception(error)

    def _stop(self) -> None:
        self._stopping = True
        self._core.abort_all()

    def _end(self, error: HoldfastError) -> None:
        """Ends the loop: closes the inbox, runs the commands still in it, and reports the end to every listener."""
        ends_now = self._inbox.close(error)  # else it was given up, and all listeners have been notified
        self._stopping = True
        for command in self._inbox.take():
            self._attempt("a command that came too late", command)
        if ends_now:
            self._tell_of_end(error)
        self._attempt("closing the runner (its ranks may be gone already)", self._runner.close)

    def _tell_of_end(self, error: HoldfastError) -> None:
        if self.on_end is not None:
            self._attempt("telling the replica of the end", partial(self.on_end, error))
        for listener in self._core.listeners:
            self._attempt("telling a listener of the end", partial(listener.on_failure, error))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        """Runs one of the last actions: none of them may keep the next from being run."""
        try:
            action()
        except Exception as error:
            logger.warning("%s failed: %s", what, error, exc_info=not isinstance(error, HoldfastError))


def _raise(error: HoldfastError) -> None:
    raise error
