"""One request on its way through the in-process engine: its tokens, its text, and whoever waits for it.

What may live here: the state of a single request. What may not: threads, and other requests.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future

from cluster.outputs import CompletionOutput, Logprob, RequestOutput
from router.text_stream import TextStream
from router.tokenizer import Tokenizer
from worker.errors import HoldfastError
from worker.request import EngineRequest, FinishReason, TokenDelta, TokenLogprob

logger = logging.getLogger(__name__)

Callback = Callable[[RequestOutput], None]


class Completion:
    """Grows with every delta until it ends, once, by its own finish or by an error."""

    def __init__(
        self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer, callback: Callback | None
    ) -> None:
        self.request = request
        self.future: Future[RequestOutput] = Future()
        self.future.set_running_or_notify_cancel()  # it is cancelled by aborting the request, not through the future
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._text_stream = TextStream(tokenizer, request.sampling_params)
        self._callback = callback
        self._token_ids: list[int] = []
        self._num_cached_tokens = 0
        self._cumulative_logprob = 0.0
        self._logprobs: list[dict[int, Logprob]] = []
        self._text = ""
        self._finish_reason: FinishReason | None = None

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None

    def take(self, delta: TokenDelta) -> None:
        """Adds what a step did and tells whoever waits. A stop string may end what the engine goes on with."""
        assert delta.first_token_index == len(self._token_ids), "tokens come in order, without gaps"
        self._num_cached_tokens += delta.num_cached_tokens
        piece = self._text_stream.push(delta.token_ids)
        self._token_ids += delta.token_ids[: piece.num_tokens]
        for item in delta.logprobs[: piece.num_tokens]:
            self._cumulative_logprob += item.logprob
            self._logprobs.append(self._by_token_id(item))
        self._text += piece.text
        self._finish_reason = FinishReason.STOP if piece.stopped else delta.finish_reason
        if self.is_finished and not piece.stopped:
            self._text += self._text_stream.finish()
        self._tell()

    def fail(self, error: HoldfastError) -> None:
        """Ends the request without a finish."""
        self._call_back(self._output(error))
        self.future.set_exception(error)

    def _tell(self) -> None:
        if self._callback is None and not self.is_finished:
            return
        output = self._output()
        self._call_back(output)
        if self.is_finished:
            self.future.set_result(output)

    def _call_back(self, output: RequestOutput) -> None:
        if self._callback is None:
            return
        try:
            self._callback(output)
        except Exception:  # it is the caller's code: whatever it raises, the request goes on, and so do others
            logger.exception("the callback of request %s failed", output.request_id)

    def _by_token_id(self, item: TokenLogprob) -> dict[int, Logprob]:
        """The drawn token first, then the best ones."""
        ranked = [(item.token_id, item.logprob, item.rank)]
        ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(item.top, start=1)]
        return {
            token_id: Logprob(
                logprob=logprob,
                rank=rank,
                decoded_token=self._tokenizer.decode((token_id,), skip_special_tokens=False),
            )
            for token_id, logprob, rank in ranked
        }

    def _output(self, error: HoldfastError | None = None) -> RequestOutput:
        has_logprobs = self.request.sampling_params.logprobs is not None
        sequence = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=list(self._token_ids),
            finish_reason=self._finish_reason,
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=list(self._logprobs) if has_logprobs else None,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[sequence],
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
            error=error,
        )
