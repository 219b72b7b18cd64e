"""The public API in the router's own process, and log-probabilities as JSON shows them."""

from collections.abc import AsyncGenerator
from typing import Any, Final

from holdfast.router.api.chat_answer import ChatDeltas, ChatPlan
from holdfast.router.generation import Generation, OutputDelta
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.gate import Gate
from holdfast.router.text.token_table import TokenTable
from holdfast.worker.request import TokenLogprob

_LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def logprob_of(logprob: float) -> float:
    """The log-probability as JSON can express it."""
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
    """In-process API of one router, on its event loop."""

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
            return plan.read(await answer.whole())

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """The completions as they come. Raises `HoldfastError`; closing the generator aborts the request."""
        self._gate.enter_trusted()
        request.check_streamable()
        plan = await ChatPlan.of(request, self._request_processor)
        async with self._request_processor.open(plan.request) as answer:
            deltas = ChatDeltas(plan, answer.received)
            async for delta in answer:
                yield delta._replace(chat=deltas.of(delta))
