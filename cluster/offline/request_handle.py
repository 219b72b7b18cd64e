"""Handle of an offline request: its way through the router, its output so far, and the caller who waits for it."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from operator import attrgetter
from typing import Final

from holdfast.cluster.offline.outputs import (
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from holdfast.router.generation import OutputDelta
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.beam_search import BeamAnswer
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import CallerError, HoldfastError, InternalError, ReplicaError
from holdfast.worker.request import FinishReason, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Callback = Callable[[RequestOutput], None]

_num_cached_tokens: Final = attrgetter("num_cached_tokens")
_num_tokens: Final = attrgetter("num_tokens")


class RequestHandle:
    """A request that was submitted. On the router's event loop a task runs `run`; `end` answers the caller, however
    that has ended.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        cancel: Callable[["RequestHandle"], None],
        callback: Callback | None = None,
        *,
        name: str,
        is_awaited: bool,
    ) -> None:
        """`name` is the request's name in outputs; without an id the router chooses one that no caller can give.
        `cancel` ends it from any thread. `is_awaited`: the caller waits for `admitted`, which alone then reports errors
        of the request.
        """
        self.request_id = name
        self.has_own_id = bool(request.request_id)
        """Whether the caller gave the request id."""
        self.future: Future[RequestOutput] = Future()
        self.future.set_running_or_notify_cancel()  # it is cancelled through the router, not through the future
        self.admitted: Future[None] = Future()
        """Done when the request has passed its checks, or when it has ended before."""
        self.beams: list[tuple[OutputDelta, Sequence[Sequence[tuple[int, float]]]]] = []
        """Results of a finished beam search: completions, each with the candidates for its tokens."""
        self._request = request
        self._tokenizer = tokenizer
        self._cancel = cancel
        self._callback = callback
        self._is_awaited = is_awaited
        self._answer: SampledAnswer | BeamAnswer | None = None
        self._arrived_s, self._arrived_ts = time.time(), time.monotonic()
        self._first_token_ts: float | None = None

    def result(self, timeout_s: float | None = None) -> RequestOutput:
        """Waits for the end. Raises what ended the request if it did not finish, or `TimeoutError`."""
        return self.future.result(timeout_s)

    def cancel(self) -> None:
        """Ends the request within one step. `result` then returns the output so far, with finish reason `abort`."""
        self._cancel(self)

    # --- on the router's event loop ---

    async def run(self, processor: RequestProcessor) -> tuple[OutputDelta, ...]:
        """Runs the request from admission to its end. Raises `HoldfastError`; cancelling it cancels the request."""
        params = self._request.sampling_params
        if params.beam_width is not None:
            async with processor.search(self._request) as search:
                self._answer = search
                self.admitted.set_result(None)
                found = await search.whole()
            self.beams = list(zip(found.completions, found.candidates, strict=True))
            return found.completions
        async with processor.open(self._request) as answer:
            self._answer = answer
            answer.admitted.on_first_token = self._note_output
            self.admitted.set_result(None)
            # A ranked request has no output before its ranking is known.
            is_streamed = self._callback is not None and params.num_sequences == params.n
            return answer.completions(await answer.outputs(self._show if is_streamed else None))

    def end(self, task: asyncio.Task[tuple[OutputDelta, ...]], failure: HoldfastError | None) -> None:
        """Answers the caller for good. `failure` is why the engine has ended, if it has."""
        try:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._fail(self._reported(error, failure))
            else:
                output = self._output(self._aborted() if task.cancelled() else task.result(), finished=True)
                if self._callback is not None:
                    self._call_back(output)
                self.future.set_result(output)
        finally:
            if not self.future.done():
                self.future.set_exception(InternalError("the output could not be delivered"))
            if not self.admitted.done():
                self.admitted.set_result(None)
            self._answer = None  # a caller that keeps the handle keeps the output alone

    def _note_output(self) -> None:
        self._first_token_ts = time.monotonic()

    def _show(self) -> None:
        """Calls back with the output so far."""
        self._call_back(self._output(self._so_far()))

    def _so_far(self) -> tuple[OutputDelta, ...]:
        if isinstance(self._answer, SampledAnswer):
            return self._answer.completions(self._answer.so_far())
        return self._nothing()

    def _nothing(self) -> tuple[OutputDelta, ...]:
        """The outputs of a request that has no answer, or of a search that has not finished."""
        n = self._request.sampling_params.n
        return tuple([OutputDelta(self.request_id, 0, (), "", sequence_index=index) for index in range(n)])

    # --- the end ---

    def _aborted(self) -> tuple[OutputDelta, ...]:
        """The output so far, where the caller has cancelled."""
        answer = self._answer
        outputs = answer.read_rest() if isinstance(answer, SampledAnswer) else self._nothing()
        ended = [output._replace(finish_reason=output.finish_reason or FinishReason.ABORT) for output in outputs]
        return answer.completions(ended) if isinstance(answer, SampledAnswer) else tuple(ended)

    def _fail(self, error: HoldfastError) -> None:
        if isinstance(error, CallerError) and self._is_awaited and not self.admitted.done():
            self.admitted.set_exception(error)
        else:
            outputs = () if self._answer is None else self._so_far()  # a refused request may ask for any number
            self._call_back(self._output(outputs, error=error))
        self.future.set_exception(error)

    def _reported(self, error: BaseException, failure: HoldfastError | None) -> HoldfastError:
        if failure is not None and isinstance(error, ReplicaError):
            return failure
        if isinstance(error, HoldfastError):
            return error
        logger.error("request %s failed: internal error", self.request_id, exc_info=error)
        return InternalError(f"the request failed: internal error: {type(error).__name__}: {error}")

    # --- outputs ---

    def _output(
        self, completions: Sequence[OutputDelta], *, finished: bool = False, error: HoldfastError | None = None
    ) -> RequestOutput:
        prompt, params = self._request.prompt, self._request.sampling_params
        answer, tokenizer = self._answer, self._tokenizer
        num_cached_tokens, metrics, outputs = 0, None, []
        asks = params.prompt_logprobs is not None
        if isinstance(answer, SampledAnswer):
            num_cached_tokens = min(map(_num_cached_tokens, answer.sequences))
            if finished and self._first_token_ts is not None:
                metrics = RequestMetrics(
                    arrival_time=self._arrived_s,
                    first_token_ts=self._first_token_ts,
                    last_token_ts=time.monotonic(),
                    first_token_latency=self._first_token_ts - self._arrived_ts,
                    num_generation_tokens=sum(map(_num_tokens, answer.streams)),
                    figures=answer.usage.figures if answer.is_over else None,
                )
        for completion in completions:
            outputs.append(completion_output(completion, params, tokenizer))
            if params.beam_width is not None:
                num_cached_tokens = completion.num_cached_tokens
        given = () if isinstance(prompt, str) else prompt
        return RequestOutput(
            request_id=self.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(given if answer is None else answer.request.prompt_token_ids),
            outputs=outputs,
            finished=finished,
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=prompt_logprobs(completions[0], tokenizer) if asks else None,
            metrics=metrics,
            error=error,
        )

    def _call_back(self, output: RequestOutput) -> None:
        if self._callback is None:
            return
        try:
            self._callback(output)
        except BaseException:  # it is the caller's code: whatever it raises, the request goes on, and so do others
            logger.exception("the callback of request %s failed", output.request_id)


# --- outputs, from those of the router ---


def completion_output(output: OutputDelta, params: SamplingParams, tokenizer: Tokenizer) -> CompletionOutput:
    """One completion, of a request with `params`."""
    has_logprobs = params.logprobs is not None
    return CompletionOutput(
        index=output.sequence_index,
        text=output.text,
        token_ids=list(output.token_ids),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        cumulative_logprob=output.cumulative_logprob,
        logprobs=[_output_logprobs(item, params, tokenizer) for item in output.logprobs] if has_logprobs else None,
    )


def prompt_logprobs(first: OutputDelta, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None]:
    """Log-probabilities of the prompt, if requested: they come with the first completion. The prompt's first token has
    no log-probability.
    """
    return [None if item is None else by_token_id(item, tokenizer) for item in first.prompt_logprobs or (None,)]


def _output_logprobs(item: TokenLogprob, params: SamplingParams, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The token itself first, then the most likely ones, or the ones requested by their ids, without ranks."""
    said = by_token_id(item, tokenizer)
    if not params.logprob_token_ids:
        return said
    return {token_id: one if token_id == item.token_id else replace(one, rank=None) for token_id, one in said.items()}


def by_token_id(item: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The token itself first, then the best ones."""
    own = {item.token_id: _logprob(item.token_id, item.logprob, item.rank, tokenizer)}
    return own | ranked(item.top, tokenizer) | own


def ranked(top: Iterable[tuple[int, float]], tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The best tokens at one place, best first."""
    return {
        token_id: _logprob(token_id, logprob, rank, tokenizer) for rank, (token_id, logprob) in enumerate(top, start=1)
    }


def _logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> Logprob:
    return Logprob(logprob=logprob, rank=rank, decoded_token=tokenizer.tokens.name_of(token_id))


def beam_sequence(
    output: OutputDelta,
    candidates: Sequence[Sequence[tuple[int, float]]],
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    keep_end: bool,
) -> BeamSearchSequence:
    """A beam as vLLM shows it: after its prompt, and without its end of sequence unless `keep_end`. `candidates` are
    those of each of its tokens, as in `Generation`.
    """
    assert output.finish_reason is not None, "a beam is returned when it has ended"
    assert output.cumulative_logprob is not None, "a beam is ranked by it"
    is_cut = output.finish_reason is FinishReason.STOP and not keep_end
    shown = output.token_ids[:-1] if is_cut else output.token_ids
    tokens = [*prompt_token_ids, *shown]
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=[ranked(one, tokenizer) for one in candidates[: len(shown)]],
        cum_logprob=output.cumulative_logprob,
        text=tokenizer.decode(tokens),
        finish_reason=output.finish_reason,
    )
