"""Known-answer check of a serving replica: one fixed request, run again and again beside all others.

A token's bits do not depend on its batch, so the first result is the only right one, at any time. A different one means
that weights, memory or arithmetic have changed since. Where results are not compared (self-checks are off, or bits
depend on the batch), the request is run in doubt alone, and any result with finite logits is a right one. What may live
here: when it is run, and the verdict. What may not: the request (`known_answer.py`), and what happens after a wrong
result (`worker/replica/replica.py`).
"""

import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import HoldfastError, InternalError, InvalidRequestError, ReplicaError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import FinishReason, Priority
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.supervision.known_answer import NAME, KnownAnswer, make_question

logger = logging.getLogger(__name__)


class KnownAnswerCheck:
    """A `StepListener` with a request now and then: `begin`, then `start`, then `stop`; or `stand_by` alone.

    Each time the question comes under a new cache salt, so that the answer is computed and not remembered. It has the
    lowest priority; like everyone's, its turn comes nevertheless. Asked while the last question is open, it is not
    asked twice.
    """

    def __init__(
        self, engine: Engine, info: ModelInfo, on_wrong: Callable[[HoldfastError], None], *, every_s: float
    ) -> None:
        """`on_wrong` is called on the engine's thread, with what was wrong."""
        self._engine = engine
        self._on_wrong = on_wrong
        self._every_s = every_s
        self._info = info
        self._salt = secrets.token_hex(8)
        self.num_asked = 0
        self.num_right = 0
        """Answers that were compared, and found right."""
        self._is_in_doubt = self._answers_doubt = False
        """Whether the engine has asked, and whether the open question came after that."""
        self._compares = True
        """Whether an answer has to be the first one; else its logits have to be finite."""
        self._is_attached = False
        self._asking = threading.Lock()
        """Of whoever asks: the check's own thread, and the engine's in doubt."""
        self._open: KnownAnswer | None = None
        """Set by whoever asks, when it is None; cleared by the engine's thread, when the question has been answered."""
        self._first: Future[KnownAnswer | None] = Future()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="known_answer_check", daemon=True)

    def begin(self) -> bytes:
        """Asks for the first time and waits for the answer, which is the right one from now on. Returns its digest;
        nothing where the question does not fit the replica, and then there is nothing to start.

        Raises what ended the engine, if that came first.
        """
        self._attach()
        self._engine.check_numbers_by(self)
        self.ask()
        first = self._first.result()
        return b"" if first is None else first.digest

    def stand_by(self) -> None:
        """Asks only where the engine is in doubt, and compares nothing. Costs nothing until then."""
        self._compares = False
        self._engine.check_numbers_by(self)

    @property
    def has_answer(self) -> bool:
        """Whether there is a first answer, that of the weights of the start."""
        return self._compares and self._first.done() and self._first.result() is not None

    def _attach(self) -> None:
        if not self._is_attached:
            self._is_attached = True
            self._engine.attach(self)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It will not ask any more, unless it is just about to."""
        self._stopped.set()

    def ask(self, priority: Priority | None = None) -> bool:
        """Asks once, without waiting; False if the last question is still open. Raises if the engine has ended."""
        with self._asking:
            if self._open is not None:
                return False
            self._open = KnownAnswer()
            self.num_asked += 1
        question = make_question(self._info.vocab_size, self._info.max_sequence_len)
        question = replace(
            question,
            request_id=f"{NAME}/{self.num_asked}",
            cache_salt=f"{self._salt}/{self.num_asked}",
            priority=question.priority if priority is None else priority,
        )
        self._engine.submit(question, self)
        return True

    # --- on the engine's thread ---

    def ask_in_doubt(self) -> bool:
        """Asks at once, before all others; after the open question, where there is one. False: no answer is known."""
        if self._compares and not self.has_answer:
            return False
        self._is_in_doubt = True
        return self._open is not None or self._ask_again()

    def _ask_again(self) -> bool:
        try:
            self._attach()
            self._answers_doubt = self.ask(Priority.CRITICAL)
        except HoldfastError:  # the engine has ended
            return False
        return True

    def on_update(self, update: StepUpdate) -> None:
        if self._is_in_doubt and self._open is None:  # the replica had no room for the last question
            self._ask_again()
            return
        answer = self._open
        if answer is None:
            return
        for delta in update.deltas:
            answer.take(delta)
            if delta.finish_reason is not None:
                self._take(answer if delta.finish_reason is FinishReason.LENGTH else None)
        for rejection in update.rejections:
            self._note_rejection(rejection.error)

    def on_failure(self, error: HoldfastError) -> None:
        self._stopped.set()
        if not self._first.done():
            self._first.set_exception(error)

    def _note_rejection(self, error: HoldfastError) -> None:
        """As when too many wait: that is no answer, and no wrong one. A question that the model fails at is."""
        logger.warning("the replica refused its self-check: %s", error)
        is_judged = self.has_answer or not self._compares
        self._take(None)
        if is_judged and isinstance(error, InternalError | InvalidRequestError):  # the latter: it fits in no sequence
            self._on_wrong(ReplicaError(f"the replica failed its self-check: {error}"))

    def _take(self, answer: KnownAnswer | None) -> None:
        """The question is answered; by nothing if it was refused or aborted."""
        self._open = None
        if self._compares and not self._first.done():
            self._first.set_result(answer)
            return
        right = self._first.result() if self._compares else answer
        if answer is None or right is None:
            return
        difference = answer.difference(right)
        if difference:
            self._on_wrong(ReplicaError(f"the replica answered its self-check wrongly: {difference}"))
            return
        self.num_right += 1
        if self._is_in_doubt and not self._answers_doubt:
            self._ask_again()
        elif self._is_in_doubt:
            self._is_in_doubt = self._answers_doubt = False
            self._engine.settle()

    # --- on its own ---

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self.ask()
            except HoldfastError as error:
                logger.debug("no self-check any more, the engine has ended: %s", error)
                return
