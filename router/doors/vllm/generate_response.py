"""Answers of vLLM's engine protocol: chunks of new tokens, and the end of each completion.

As vLLM's own server sends them: counts of a chunk are those of its own tokens, and in a stream the end repeats the
tokens of the last chunk, which gateways do not count twice. What may not live here: requests (`generate_request.py`).
"""

from collections.abc import Collection, Iterator, Sequence

from holdfast.foreign import vllm_engine_pb2
from holdfast.router.events import Deliver
from holdfast.worker.request import FinishReason, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams


class GenerateResponses:
    """Of one request."""

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], eos_token_ids: Collection[int], *, stream: bool
    ) -> None:
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        self._own_ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stream = stream
        self._tails: dict[int, str] = {}
        self._longest_stop = max(map(len, params.stop_strings), default=0)

    def of(self, delivery: Deliver) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """The messages for one delivery; without a stream, deliveries are whole."""
        if self._stream:
            yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(delivery))
        self._note_text(delivery)
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
        matched = self._matched(delivery)
        if isinstance(matched, int):
            complete.matched_token_id = matched
        elif matched is not None:
            complete.matched_stop_str = matched
        return complete

    def _matched(self, delivery: Deliver) -> int | str | None:
        """The stop token or string that ended a completion; None for the model's own end, or another reason."""
        if delivery.finish_reason is not FinishReason.STOP:
            return None
        last = delivery.token_ids[-1] if delivery.token_ids else None
        if last is not None and last in self._params.stop_token_ids:
            return last
        if last in self._own_ends:
            return None
        tail = self._tails.get(delivery.sequence_index, "")
        return max((stop for stop in self._params.stop_strings if tail.endswith(stop)), key=len, default=None)

    def _note_text(self, delivery: Deliver) -> None:
        if self._longest_stop:
            text = self._tails.get(delivery.sequence_index, "") + delivery.text
            self._tails[delivery.sequence_index] = text[-self._longest_stop :]


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
