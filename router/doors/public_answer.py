"""Response conversion: makes the public API's chunks and generations from the dispatcher core's deliveries.

The core has its own types because deliveries carry more than clients get: each has its own guarantee of identity, for
one. What may live here: this conversion, for every protocol. What may not: wire formats (`router/wire/`).
"""

from holdfast.router.events import Deliver
from holdfast.router.generation import Chunk, GeneratedSequence, Generation
from holdfast.router.requests.answer import CompletedRequest, CompletedSequence
from holdfast.worker.request import TokenLogprob


def public_chunk(delivery: Deliver) -> Chunk:
    return Chunk(
        request_id=delivery.request_id,
        sequence_index=delivery.sequence_index,
        first_token_index=delivery.first_token_index,
        token_ids=delivery.token_ids,
        text=delivery.text,
        finish_reason=delivery.finish_reason,
        logprobs=delivery.logprobs,
        prompt_logprobs=_by_position(delivery.prompt_logprobs),
        usage=delivery.usage,
        replayed_without_guarantee=not delivery.identity_guaranteed,
        system_fingerprint=delivery.fingerprint,
    )


def public_generation(answer: CompletedRequest) -> Generation:
    """The whole response. The prompt's log-probabilities are taken from the first completion."""
    first = answer.completions[0].output
    return Generation(
        request_id=answer.request_id,
        model=answer.model,
        completions=tuple(map(_sequence, answer.completions)),
        usage=answer.usage,
        prompt_logprobs=_by_position(first.prompt_logprobs),
        replayed_without_guarantee=not all(item.output.identity_guaranteed for item in answer.completions),
        system_fingerprint=first.fingerprint,
    )


def _sequence(completion: CompletedSequence) -> GeneratedSequence:
    output = completion.output
    return GeneratedSequence(
        sequence_index=output.sequence_index,
        token_ids=output.token_ids,
        text=output.text,
        finish_reason=output.finish_reason,
        logprobs=output.logprobs,
        cumulative_logprob=completion.cumulative_logprob,
    )


def _by_position(logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob | None, ...]:
    """By prompt position: the first token has no log-probability, and the core leaves it out."""
    return (None, *logprobs) if logprobs else ()
