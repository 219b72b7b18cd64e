"""One sequence of an in-process request as it grows: tokens, text and log-probabilities.

What may live here: what a single sequence has come to. What may not: its siblings (`completion.py`), and who waits.
"""

from collections.abc import Sequence

from holdfast.cluster.offline.outputs import CompletionOutput, Logprob
from holdfast.router.text.text_stream import TextStream
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.request import EngineRequest, FinishReason, TokenDelta, TokenLogprob


class SequenceOutput:
    """Grows with every delta until it has a finish reason. `echo` is the text that it begins with."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, echo: str = "") -> None:
        self._tokenizer = tokenizer
        self._text_stream = TextStream(tokenizer, request.sampling_params, request.prompt_token_ids)
        self._text = echo
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.num_cached_tokens = 0
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        self.finish_reason: FinishReason | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def token_logprobs(self) -> list[float]:
        """Those of the tokens so far, where they were asked for."""
        return [item.logprob for item in self._logprobs]

    def take(self, delta: TokenDelta) -> None:
        """Adds what a step did. A stop string may end what the engine goes on with."""
        assert delta.first_token_index == len(self._token_ids), "tokens come in order, without gaps"
        self.num_cached_tokens += delta.num_cached_tokens
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        piece = self._text_stream.push(delta.token_ids)
        self._token_ids += delta.token_ids[: piece.num_tokens]
        self._logprobs += delta.logprobs[: piece.num_tokens]
        self._text += piece.text
        self.finish_reason = FinishReason.STOP if piece.stopped else delta.finish_reason
        if self.is_finished and not piece.stopped:
            self._text += self._text_stream.finish()

    def output(self, index: int, *, has_logprobs: bool, is_ranked: bool = False) -> CompletionOutput:
        """What there is so far. The sum of the log-probabilities is told as well if only the ranking needed them."""
        return CompletionOutput(
            index=index,
            text=self._text,
            token_ids=list(self._token_ids),
            finish_reason=self.finish_reason,
            cumulative_logprob=sum(self.token_logprobs) if has_logprobs or is_ranked else None,
            logprobs=[by_token_id(item, self._tokenizer) for item in self._logprobs] if has_logprobs else None,
        )


def by_token_id(item: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The token itself first, then the best ones."""
    ranked = [(item.token_id, item.logprob, item.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(item.top, start=1)]
    return {
        token_id: Logprob(
            logprob=logprob, rank=rank, decoded_token=tokenizer.decode((token_id,), skip_special_tokens=False)
        )
        for token_id, logprob, rank in ranked
    }
