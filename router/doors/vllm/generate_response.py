"""Answers of vLLM's engine protocol: chunks of new tokens, and the end of each completion.

As vLLM's own server sends them: counts of a chunk are those of its own tokens, and in a stream the end repeats the
tokens of the last chunk, which gateways do not count twice. What may not live here: requests (`generate_request.py`).
"""

from collections.abc import Callable, Iterator, Sequence

from holdfast.foreign import vllm_engine_pb2
from holdfast.router.events import Deliver
from holdfast.worker.request import TokenLogprob


class GenerateResponses:
    """Of one request."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        stop_reason: Callable[[int, Deliver], str | int | None],
        *,
        stream: bool,
    ) -> None:
        """`stop_reason` as of `SampledAnswer`."""
        self._prompt_token_ids = prompt_token_ids
        self._stop_reason = stop_reason
        self._stream = stream

    def of(self, delivery: Deliver) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """The messages for one delivery; without a stream, deliveries are whole."""
        if self._stream:
            yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(delivery))
        if delivery.finish_reason is not None:
            yield vllm_engine_pb2.GenerateResponse(complete=self._complete(delivery))

    def _chunk(self, delivery: Deliver) -> vllm_engine_pb2.GenerateStreamChunk:
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=delivery.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(delivery.token_ids),
            cached_tokens=delivery.num_cached_tokens,
            output_logprobs=output_logprobs(delivery.logprobs),
            input_logprobs=input_logprobs(self._prompt_token_ids, delivery.prompt_logprobs),
            index=delivery.sequence_index,
        )

    def _complete(self, delivery: Deliver) -> vllm_engine_pb2.GenerateComplete:
        assert delivery.finish_reason is not None
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=delivery.token_ids,
            finish_reason=delivery.finish_reason.value,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(delivery.token_ids),
            cached_tokens=delivery.num_cached_tokens,
            output_logprobs=output_logprobs(delivery.logprobs),
            input_logprobs=input_logprobs(self._prompt_token_ids, delivery.prompt_logprobs),
            index=delivery.sequence_index,
        )
        matched = self._stop_reason(delivery.sequence_index, delivery)
        if isinstance(matched, int):
            complete.matched_token_id = matched
        elif matched is not None:
            complete.matched_stop_str = matched
        return complete


def output_logprobs(logprobs: Sequence[TokenLogprob]) -> vllm_engine_pb2.OutputLogProbs | None:
    """None where there are none."""
    if not logprobs:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[item.logprob for item in logprobs],
        token_ids=[item.token_id for item in logprobs],
        top_logprobs=_tops(logprobs),
    )


def input_logprobs(
    prompt_token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> vllm_engine_pb2.InputLogProbs | None:
    """None where there are none. `logprobs` begin with the second token: the first has none."""
    if not logprobs:
        return None
    tops = _tops(logprobs)
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[
            vllm_engine_pb2.InputTokenLogProb(),
            *(vllm_engine_pb2.InputTokenLogProb(value=item.logprob) for item in logprobs),
        ],
        token_ids=prompt_token_ids,
        top_logprobs=[vllm_engine_pb2.TopLogProbs(), *tops] if tops else [],
    )


def _tops(logprobs: Sequence[TokenLogprob]) -> list[vllm_engine_pb2.TopLogProbs]:
    """One for each position, or none at all where no alternatives were asked for."""
    if not any(item.top for item in logprobs):
        return []
    return [
        vllm_engine_pb2.TopLogProbs(
            values=[logprob for _, logprob in item.top], token_ids=[token_id for token_id, _ in item.top]
        )
        for item in logprobs
    ]
