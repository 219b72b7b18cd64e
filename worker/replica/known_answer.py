"""Known answer: a fixed request, its result, and the first difference between two results of it."""

import logging
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import zip_longest
from typing import Final

from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import HoldfastError, InternalError, InvalidRequestError, ReplicaError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.replica.probe_loop import ProbeLoop
from holdfast.worker.request import EngineRequest, FinishReason, Priority, TokenDelta, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate

NUM_PROMPT_TOKENS: Final = 80
"""Over a block, a row tile and a tile of keys, on every device."""

NUM_OUTPUT_TOKENS: Final = 8

NAME: Final = "self-check"
"""Id of the request and of its tenant: it is charged to no other tenant."""

_DIGEST_BYTES: Final = 4


def make_question(vocab_size: int, max_sequence_len: int) -> EngineRequest:
    """The question for a vocabulary of this size, cut to fit a sequence; to be asked under separate ids and salts.

    The output is drawn with noise. Beside each token of output and prompt stands the best one, so greedy choice is
    asked for as well, and log-probabilities are functions of all the logits.
    """
    num_prompt_tokens = max(1, min(NUM_PROMPT_TOKENS, max_sequence_len - NUM_OUTPUT_TOKENS))
    return EngineRequest(
        request_id=NAME,
        prompt_token_ids=tuple(_random_number(index) % vocab_size for index in range(num_prompt_tokens)),
        sampling_params=SamplingParams(
            temperature=1.0, seed=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1
        ),
        priority=Priority.LOW,
        tenant=NAME,
    )


@dataclass(slots=True)
class KnownAnswer:
    """The output so far: tokens and log-probabilities."""

    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt from the second token on."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, delta: TokenDelta) -> None:
        self.prompt_logprobs += delta.prompt_logprobs
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    @property
    def digest(self) -> bytes:
        """Equal answers have equal digests, on every machine; others hardly ever."""
        digest = blake2b(struct.pack(f"<{len(self.token_ids)}q", *self.token_ids), digest_size=_DIGEST_BYTES)
        for packed in (*_packed(self.prompt_logprobs), *_packed(self.logprobs)):
            digest.update(packed)
        return digest.digest()

    def difference(self, right: "KnownAnswer") -> str:
        """The first place where this answer is not the right one, in words; empty if it is right."""
        parts = (
            ("prompt token", self.prompt_logprobs, right.prompt_logprobs),
            ("output token", self.token_ids, right.token_ids),
            ("log-probability of output token", self.logprobs, right.logprobs),
        )
        for name, found, expected in parts:
            for index, (one, other) in enumerate(zip_longest(found, expected)):
                if one != other:
                    return f"{name} {index}: {one}, not {other}"
        return ""


def _packed(items: Iterable[TokenLogprob]) -> Iterator[bytes]:
    for item in items:
        yield struct.pack("<qdq", item.token_id, item.logprob, item.rank)
        yield from (struct.pack("<qd", *best) for best in item.top)


def _random_number(index: int) -> int:
    """The same on every machine and for ever."""
    return int.from_bytes(blake2b(index.to_bytes(8, "little"), digest_size=8).digest(), "little")


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
        """`on_wrong` is called on the engine's thread, with the difference."""
        self._engine = engine
        self._on_wrong = on_wrong
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
        """Held by the thread that asks: the check's own, or the engine's in doubt."""
        self._open: KnownAnswer | None = None
        """Set by the thread that asks, when it is None; cleared by the engine's thread, when the question has been
        answered."""
        self._first: Future[KnownAnswer | None] = Future()
        self._loop = ProbeLoop("known_answer_check", every_s, self._ask_now_and_then, at_once=False)

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
        self._loop.start()

    def stop(self) -> None:
        """Stops asking; a question that is about to be asked may still come."""
        self._loop.stop()

    def join(self) -> None:
        """Waits after `stop` for a question that is being asked."""
        self._loop.join()

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
        self.stop()
        if not self._first.done():
            self._first.set_exception(error)

    def _note_rejection(self, error: HoldfastError) -> None:
        """Notes a rejection. One for lack of room is no answer, and no wrong one; a question that the model fails at is
        wrong.
        """
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

    def _ask_now_and_then(self) -> None:
        try:
            self.ask()
        except HoldfastError as error:
            logger.debug("no further self-checks, the engine has ended: %s", error)
            self.stop()
