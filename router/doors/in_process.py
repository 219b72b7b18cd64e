"""In-process door: requests from the router's own process, answered in the public words, without a wire.

What may live here: this translation. What may not: who calls, and how calls reach the process
(`cluster/serve/router_deployment.py`).
"""

from collections.abc import AsyncGenerator
from dataclasses import replace

from holdfast.router.doors.chat_answer import ChatDeltas, ChatPlan
from holdfast.router.doors.public_answer import public_chunk, public_generation
from holdfast.router.generation import Chunk, Generation
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.gate import Gate


class InProcessDoor:
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
            async for delivery in answer:
                yield replace(public_chunk(delivery), chat=deltas.of(delivery))
