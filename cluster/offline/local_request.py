"""Offline request: its way through the router, its output so far, and the caller who waits for it."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from holdfast.cluster.offline.outputs import RequestMetrics, RequestOutput, completion_output, prompt_logprobs
from holdfast.router.dispatch.output_stream import merged
from holdfast.router.dispatch.parallel_sampling import is_ranked
from holdfast.router.events import OutputDelta
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import CompletedSequence, SampledAnswer
from holdfast.router.requests.beam_search import BeamAnswer
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import CallerError, HoldfastError, InternalError, ReplicaError
from holdfast.worker.request import FinishReason

logger = logging.getLogger(__name__)

Callback = Callable[[RequestOutput], None]


class LocalRequest:
    """One request, on the router's event loop: a task runs `run`; `end` answers the caller, however that has ended."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        callback: Callback | None = None,
        *,
        name: str,
        is_awaited: bool,
    ) -> None:
        """`name` is what outputs call it; without an id of its own the router chooses one that nobody can write.
        `is_awaited`: the caller waits for `admitted`, which alone then reports what is wrong with the request."""
        self.request_id = name
        self.has_own_id = bool(request.request_id)
        """Its caller has given the id."""
        self.future: Future[RequestOutput] = Future()
        self.future.set_running_or_notify_cancel()  # it is cancelled through the router, not through the future
        self.admitted: Future[None] = Future()
        """Done when the request has passed its checks, or when it has ended before."""
        self.beams: tuple[CompletedSequence, ...] = ()
        """What a beam search that has finished has found."""
        self._request = request
        self._tokenizer = tokenizer
        self._callback = callback
        self._is_awaited = is_awaited
        self._answer: SampledAnswer | BeamAnswer | None = None
        self._pieces: list[list[OutputDelta]] = [[] for _ in range(request.sampling_params.num_sequences)]
        self._num_unfinished = len(self._pieces)
        self._is_streamed = callback is not None and not is_ranked(request.sampling_params)
        self._arrived_s, self._arrived_ts = time.time(), time.monotonic()
        self._first_token_ts: float | None = None

    async def run(self, processor: RequestProcessor) -> tuple[CompletedSequence, ...]:
        """From admission to the end. Raises `HoldfastError`; cancelling it cancels the request."""
        if self._request.sampling_params.beam_width is not None:
            async with processor.search(self._request) as search:
                self._begin(search)
                self.beams = (await search.whole()).completions
            return self.beams
        async with processor.open(self._request) as answer:
            self._begin(answer)
            if not self._is_streamed:
                answer.await_ends(self._note_output)
            try:
                async for delivery in answer:
                    self._take(delivery)
            except asyncio.CancelledError:
                self._take_unread(answer)
                raise
            return answer.completions(self._outputs())

    def end(self, task: asyncio.Task[tuple[CompletedSequence, ...]], failure: HoldfastError | None) -> None:
        """Answers the caller for good. `failure` is why the engine has ended, if it has."""
        try:
            if task.cancelled():
                self._finish(self._aborted())
            elif (error := task.exception()) is None:
                self._finish(task.result())
            else:
                self._fail(self._reported(error, failure))
        finally:
            if not self.future.done():
                self.future.set_exception(InternalError("the output could not be delivered"))
            if not self.admitted.done():
                self.admitted.set_result(None)
            self._pieces, self._answer = [], None  # whoever keeps the handle keeps the output alone

    # --- on the way ---

    def _begin(self, answer: SampledAnswer | BeamAnswer) -> None:
        self._answer = answer
        self.admitted.set_result(None)

    def _take(self, delivery: OutputDelta) -> None:
        """A ranked request has no output before its ranking is known; the final output comes from `end`."""
        self._note_output()
        self._pieces[delivery.sequence_index].append(delivery)
        self._num_unfinished -= delivery.finish_reason is not None
        if self._is_streamed and self._num_unfinished:
            self._call_back(self._output(self._so_far()))

    def _note_output(self) -> None:
        if self._first_token_ts is None:
            self._first_token_ts = time.monotonic()

    def _take_unread(self, answer: SampledAnswer) -> None:
        with suppress(HoldfastError):
            for delivery in answer.unread():
                self._pieces[delivery.sequence_index].append(delivery)

    def _outputs(self) -> list[OutputDelta]:
        """What has come of each sequence, in one delivery."""
        for index, pieces in enumerate(self._pieces):
            nothing = OutputDelta(
                request_id=self.request_id, sequence_index=index, first_token_index=0, token_ids=(), text=""
            )
            pieces[:] = [merged(pieces) if pieces else nothing]
        return [pieces[0] for pieces in self._pieces]

    def _so_far(self, outputs: Sequence[OutputDelta] | None = None) -> tuple[CompletedSequence, ...]:
        outputs = self._outputs() if outputs is None else outputs
        if isinstance(self._answer, SampledAnswer):
            return self._answer.completions(outputs)
        return tuple(CompletedSequence(output=output) for output in outputs[: self._request.sampling_params.n])

    # --- the end ---

    def _aborted(self) -> tuple[CompletedSequence, ...]:
        """What there is, where the caller has cancelled."""
        return self._so_far(
            [output._replace(finish_reason=output.finish_reason or FinishReason.ABORT) for output in self._outputs()]
        )

    def _finish(self, completions: Sequence[CompletedSequence]) -> None:
        output = self._output(completions, finished=True)
        self._call_back(output)
        self.future.set_result(output)

    def _fail(self, error: HoldfastError) -> None:
        if isinstance(error, CallerError) and self._is_awaited and not self.admitted.done():
            self.admitted.set_exception(error)
        else:
            self._call_back(self._output(self._so_far(), error=error))
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
        self, completions: Sequence[CompletedSequence], *, finished: bool = False, error: HoldfastError | None = None
    ) -> RequestOutput:
        prompt, params = self._request.prompt, self._request.sampling_params
        given = () if isinstance(prompt, str) else prompt
        cached = [pieces[0].num_cached_tokens if pieces else 0 for pieces in self._pieces]
        if params.beam_width is not None:
            cached = [completion.output.num_cached_tokens for completion in completions]
        prompt_ids = given if self._answer is None else self._answer.prompt_token_ids
        return RequestOutput(
            request_id=self.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(prompt_ids),
            outputs=[completion_output(completion, params, self._tokenizer) for completion in completions],
            finished=finished,
            num_cached_tokens=min(cached),
            prompt_logprobs=prompt_logprobs(completions[0], params, self._tokenizer),
            metrics=self._metrics() if finished else None,
            error=error,
        )

    def _metrics(self) -> RequestMetrics | None:
        if self._first_token_ts is None:
            return None
        return RequestMetrics(
            arrival_time=self._arrived_s,
            first_token_ts=self._first_token_ts,
            last_token_ts=time.monotonic(),
            first_token_latency=self._first_token_ts - self._arrived_ts,
            num_generation_tokens=sum(len(delivery.token_ids) for pieces in self._pieces for delivery in pieces),
        )

    def _call_back(self, output: RequestOutput) -> None:
        if self._callback is None:
            return
        try:
            self._callback(output)
        except BaseException:  # it is the caller's code: whatever it raises, the request goes on, and so do others
            logger.exception("the callback of request %s failed", output.request_id)
