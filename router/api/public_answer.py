"""Response conversion: makes the public API's chunks and generations from the dispatcher core's deltas.

The core has its own types because deltas carry more than clients get: each has its own guarantee of identity, for
one.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Final

from holdfast.router.api.chat_answer import ChatDeltas, ChatPlan
from holdfast.router.events import OutputDelta
from holdfast.router.generation import Chunk, GeneratedSequence, Generation
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import CompletedRequest, CompletedSequence
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.gate import Gate
from holdfast.router.text.token_table import TokenTable
from holdfast.worker.request import TokenLogprob


def public_chunk(delta: OutputDelta) -> Chunk:
    return Chunk(
        request_id=delta.request_id,
        sequence_index=delta.sequence_index,
        first_token_index=delta.first_token_index,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=delta.finish_reason,
        logprobs=delta.logprobs,
        prompt_logprobs=_by_position(delta.prompt_logprobs),
        usage=delta.usage,
        replayed_without_guarantee=not delta.identity_guaranteed,
        system_fingerprint=delta.fingerprint,
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


_LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def logprob_of(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, _LEAST)


def by_token_id(item: TokenLogprob, tokens: TokenTable, *, are_best: bool = True) -> dict[str, dict[str, Any]]:
    """The candidates at one position, the token itself among them. Unless they `are_best`, only its rank is known."""
    ranked: dict[int, tuple[float, int | None]] = {
        token_id: (logprob, rank if are_best else None) for rank, (token_id, logprob) in enumerate(item.top, 1)
    }
    ranked[item.token_id] = item.logprob, item.rank
    return {
        str(token_id): {"logprob": logprob_of(logprob), "rank": rank, "decoded_token": tokens.name_of(token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }


class InProcessApi:
    """Of one router, on its event loop."""

    def __init__(self, request_processor: RequestProcessor, gate: Gate | None = None) -> None:
        self._request_processor = request_processor
        self._gate = gate or Gate()

    async def generate(self, request: GenerationRequest) -> Generation:
        """All completions, when they have ended. Raises `HoldfastError`; cancelling the task aborts the request."""
        self._gate.enter_trusted()
        plan = await ChatPlan.of(request, self._request_processor)
        is_search = request.sampling_params.beam_width is not None
        opening = self._request_processor.search if is_search else self._request_processor.open
        async with opening(plan.request) as answer:
            return plan.read(public_generation(await answer.whole()))

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """The completions as they come. Raises `HoldfastError`; closing the generator aborts the request."""
        self._gate.enter_trusted()
        request.check_streamable()
        plan = await ChatPlan.of(request, self._request_processor)
        async with self._request_processor.open(plan.request) as answer:
            deltas = ChatDeltas(plan, answer.received)
            async for delta in answer:
                yield replace(public_chunk(delta), chat=deltas.of(delta))
