"""The engine: one thread that plans, runs, commits and delivers, step after step, until it is stopped or fails.

What may live here: the loop and its inbox. What may not: decisions about what a step does (`scheduler.py`), arithmetic
(`model_runner.py`), who hears of what (`mailboxes.py`), wires and event loops (`link.py`).

    submit, abort ──► inbox ──► scheduler.add ─► plan ─► runner.run ─► commit ──► listener.on_update
                                     └──────────────── one turn ────────────────┘

Whichever way the loop ends, every request that was submitted has been answered.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Final

from worker.batching_optimizer import Recommendation
from worker.engine_updates import EngineUpdate, StepListener
from worker.errors import DeadlineExceededError, HoldfastError, InvalidRequestError, ReplicaError
from worker.inbox import Inbox
from worker.mailboxes import Mailboxes
from worker.plan import StepPlan, StepResult, StepRunner
from worker.progress import ProgressCounter
from worker.request import EngineLoad, EngineRequest, TokenDelta
from worker.scheduler import Scheduler
from worker.stats import EngineStats
from worker.step_tuner import StepTuner
from worker.suspects import Suspects

logger = logging.getLogger(__name__)

STATS_EVERY_STEPS: Final = 32
"""A busy engine works its statistics out once in so many steps, and whenever it falls idle."""


class Engine:
    """A scheduler and a runner on a thread of their own. All methods are safe to call from any thread."""

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
    ) -> None:
        """`progress` is what the runner moves inside a step, if it does. `tuner` watches the steps and sets their
        limits, as far as it is told to; `clock` gives seconds.
        """
        self.progress = progress or ProgressCounter()
        self._scheduler = scheduler
        self._runner = runner
        self._tuner = tuner
        self._clock = clock
        self._idle_s = idle_s
        self._inbox = Inbox()
        self._stopping = False
        self._mailboxes = Mailboxes()
        self._suspects: Suspects[StepListener] = Suspects()
        self._num_requests = 0
        self._num_tokens_generated = 0
        self._step_time_s = 0.0
        self._step_id = 0
        self._stats_step_id = 0  # of the step that statistics were last told of
        self._load = scheduler.load()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # --- for any thread ---

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Aborts what is running, answers everyone and joins the thread. Safe to call twice."""
        self._inbox.put_unless_closed(self._stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def attach(self, listener: StepListener) -> None:
        """From now on `listener` hears of every step. Raises `ReplicaError` if the engine has ended."""
        self._inbox.put(lambda: self._mailboxes.attach(listener))

    def follow_cache(self, listener: StepListener) -> None:
        """From now on the updates of an attached listener say what the prefix cache holds: all of it, then changes.

        As long as nobody follows, nothing is kept for it.
        """
        self._inbox.put_unless_closed(lambda: self._follow_cache(listener))

    def detach(self, listener: StepListener) -> None:
        """`listener` hears nothing more, and its requests are aborted."""
        self._inbox.put_unless_closed(lambda: self._detach(listener))

    def submit(self, request: EngineRequest, listener: StepListener) -> None:
        """Queues a request of an attached listener. Raises `ReplicaError` if the engine has ended."""
        self._inbox.put(lambda: self._submit(request, listener))

    def abort(self, request_id: str) -> None:
        """Ends a request within one step; its last delta then says `ABORT`. Unknown ids are ignored."""
        self._inbox.put_unless_closed(lambda: self._abort(request_id))

    def fail(self, error: HoldfastError) -> None:
        """Ends the engine from outside, as when a rank has died while nothing was running."""
        self._inbox.put_unless_closed(lambda: _raise(error))

    def give_up(self, error: HoldfastError) -> None:
        """Ends a frozen engine: tells every listener now, on this thread, because the engine's may never come back."""
        if self._inbox.close(error):
            self._stopping = True
            self._tell_of_end(error)

    def stats(self, timeout_s: float = 30.0) -> EngineStats:
        """Exact counts between two steps. Raises `ReplicaError` if the engine has ended."""
        future: Future[EngineStats] = Future()
        self._inbox.put(lambda: future.set_result(self._stats()))
        return future.result(timeout_s)

    def recommendations(self, timeout_s: float = 30.0) -> list[Recommendation]:
        """What the tuner would set differently. Raises `ReplicaError` if the engine has ended."""
        future: Future[list[Recommendation]] = Future()
        self._inbox.put(lambda: future.set_result(self._tuner.get_recommendations() if self._tuner else []))
        return future.result(timeout_s)

    @property
    def load(self) -> EngineLoad:
        """As of the last step, for a router that has nothing here."""
        return self._load

    @property
    def has_work(self) -> bool:
        """Whether anything waits to be done. While it does, `progress` should move."""
        return self._inbox.closed_by is None and (self._scheduler.has_work or not self._inbox.is_empty)

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
        except HoldfastError as failure:
            error = failure
        except Exception as bug:
            logger.exception("the engine failed")
            error = ReplicaError(f"the replica failed: {type(bug).__name__}: {bug}")
            error.__cause__ = bug
        finally:
            self._end(error)

    def _take_commands(self) -> None:
        """Runs everything in the inbox; with nothing to do, waits for the first command."""
        if not self._scheduler.has_work and self._inbox.is_empty:
            first = self._inbox.wait(self._idle_s) or self._runner.keep_alive
            first()
        for command in self._inbox.take_all():
            command()

    def _turn(self) -> None:
        began_s = self._clock()
        plan = None if self._stopping else self._scheduler.plan(began_s)
        for request_id in self._scheduler.take_expired():
            self._suspects.drop(request_id)
            self._mailboxes.reject(request_id, DeadlineExceededError("the request's time was up in the replica"))
        if plan is None:
            self._deliver(stepped=False)
            return
        if self._suspects.has_news and len(self._mailboxes.listeners) > 1:
            self._deliver(stepped=False)
        num_before = self._num_tokens_generated
        result = self._run_plan(plan)
        for delta in self._scheduler.commit(plan, result):
            self._keep(delta)
        num_gained = self._num_tokens_generated - num_before
        self._deliver(stepped=True)
        if self._tuner is not None:
            self._tune(self._tuner, plan.with_drafts(result.drafts), self._clock() - began_s, num_gained)

    def _run_plan(self, plan: StepPlan) -> StepResult:
        self.progress.begin_step(plan.num_tokens)
        started_s = self._clock()
        result = self._runner.run(plan)
        step_s = self._clock() - started_s
        self.progress.end_step(plan.num_tokens, step_s)
        self._step_time_s += step_s
        self._note_speed(plan.num_tokens, step_s)
        self._step_id = plan.step_id
        return result

    def _tune(self, tuner: StepTuner, plan: StepPlan, turn_s: float, num_gained: int) -> None:
        """What counts is the whole turn: it is what a stream waits for."""
        news = tuner.observe(plan, step_s=turn_s, num_gained=num_gained, num_waiting=self._load.num_waiting)
        for recommendation in news:
            logger.info("%s", recommendation)
        limits = tuner.next_limits()
        if limits is not None:
            self._scheduler.limits = limits

    def _note_speed(self, num_tokens: int, step_time_s: float) -> None:
        """The best speed of all steps is what a request can hope for; most steps are slower, having less to do."""
        if step_time_s > 0:
            self._scheduler.tokens_per_s = max(num_tokens / step_time_s, self._scheduler.tokens_per_s or 0.0)

    def _deliver(self, *, stepped: bool) -> None:
        if self._inbox.closed_by is not None:
            return  # it was given up meanwhile, and everyone has been told so
        before, self._load = self._load, self._suspects.load_for(None, self._scheduler.load())
        concerns_all = stepped or self._load != before or self._suspects.has_news
        self._suspects.has_news = False
        stats = self._stats() if concerns_all and self._stats_are_due() else None
        if self._mailboxes.anyone_follows_cache:
            self._mailboxes.note_cache_events(self._scheduler.take_cache_events())
        for listener, mailbox in self._mailboxes.items():
            if concerns_all or mailbox.has_news:
                load = self._suspects.load_for(listener, self._load)
                update = mailbox.take(self._step_id, load, stats or (self._stats() if mailbox.is_new else None))
                self._tell(listener, update)

    def _stats_are_due(self) -> bool:
        if self._scheduler.has_work and self._step_id < self._stats_step_id + STATS_EVERY_STEPS:
            return False
        self._stats_step_id = self._step_id
        return True

    def _tell(self, listener: StepListener, update: EngineUpdate) -> None:
        """A listener that breaks loses its own requests, not everybody's."""
        try:
            listener.on_update(update)
        except Exception:  # whatever it raises is the listener's own fault
            logger.exception("a listener failed; its requests are aborted")
            self._detach(listener)

    def _submit(self, request: EngineRequest, listener: StepListener) -> None:
        self._num_requests += 1
        if not self._mailboxes.is_attached(listener):
            return  # detached meanwhile: nobody waits for an answer
        request_id = request.request_id
        try:
            if self._mailboxes.is_owned(request_id):
                raise InvalidRequestError("request_id", request_id, "is in use by a request that has not ended")
            self._suspects.check(request, listener)
            finished = self._scheduler.add(request, self._clock())
        except HoldfastError as error:
            self._mailboxes.refuse(request_id, error, listener)
            return
        self._mailboxes.own(request_id, listener)
        self._suspects.add(request, listener)
        if finished is not None:
            self._keep(finished)

    def _follow_cache(self, listener: StepListener) -> None:
        # Events from before that nobody has taken yet follow, and say the same of each block as this does.
        self._mailboxes.follow_cache(listener, self._scheduler.cached_block_hashes())

    def _abort(self, request_id: str) -> None:
        delta = self._scheduler.abort(request_id)
        if delta is not None:
            self._keep(delta)

    def _keep(self, delta: TokenDelta) -> None:
        self._num_tokens_generated += len(delta.token_ids)
        self._suspects.note(delta)
        self._mailboxes.put(delta)

    def _detach(self, listener: StepListener) -> None:
        for request_id in self._mailboxes.detach(listener):
            self._abort(request_id)

    def _stats(self) -> EngineStats:
        load = self._scheduler.load()
        return EngineStats(
            **asdict(self._scheduler.stats()),
            num_requests=self._num_requests,
            num_tokens_generated=self._num_tokens_generated,
            step_time_s=self._step_time_s,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_waiting_tokens=load.num_waiting_tokens,
        )

    def _stop(self) -> None:
        self._stopping = True
        for delta in self._scheduler.abort_all():
            self._keep(delta)

    def _end(self, error: HoldfastError) -> None:
        """The one way out of the loop: closes the inbox, runs what is still in it, and tells every listener."""
        ends_now = self._inbox.close(error)  # else it was given up, and everyone has been told so
        self._stopping = True
        for command in self._inbox.take_all():
            self._attempt("a command that came too late", command)
        if ends_now:
            self._tell_of_end(error)
        self._attempt("closing the runner (its ranks may be gone already)", self._runner.close)

    def _tell_of_end(self, error: HoldfastError) -> None:
        for listener in self._mailboxes.listeners:
            self._attempt("telling a listener of the end", partial(listener.on_failure, error))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        """Runs one of the last actions: none of them may keep the next from being run."""
        try:
            action()
        except Exception as error:
            is_bug = not isinstance(error, HoldfastError)
            logger.warning("%s failed: %s", what, error, exc_info=is_bug)


def _raise(error: HoldfastError) -> None:
    raise error
