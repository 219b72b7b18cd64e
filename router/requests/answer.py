"""The answer to one client's request: its completions, read together as they are drawn, or all at once.

What may live here: waiting for output of a call, and what is told of its completions in the end. What may not: gRPC, and
how a completion comes about (`call.py`).
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.router.dispatch.call import Call
from holdfast.router.dispatch.output_stream import merged
from holdfast.router.dispatch.parallel_sampling import best, is_ranked
from holdfast.router.events import Deliver, Usage
from holdfast.worker.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole output."""

    output: Deliver
    cumulative_logprob: float | None = None
    """The sum over the tokens, where their log-probabilities are known."""
    candidates: Sequence[Sequence[tuple[int, float]]] = ()
    """Of a beam: for each of its tokens, the likeliest (token id, logprob) at that place, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """All that a request has come to."""

    request_id: str
    model: str
    completions: tuple[Completion, ...]
    usage: Usage


class SampledAnswer:
    """A call for one task that reads it, which either iterates or asks for the whole.

    Iterating gives what `Call.poll` gives, and raises what it raises, as soon as there is something. `has_output` is set
    whenever there may be some.
    """

    def __init__(
        self,
        call: Call,
        has_output: asyncio.Event,
        model: str,
        params: SamplingParams,
        prompt_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.request_id = call.request_id
        self.model = model
        self.prompt_token_ids = prompt_token_ids
        """What is kept of the prompt."""
        self._call = call
        self._has_output = has_output
        self._params = params

    def __aiter__(self) -> "SampledAnswer":
        return self

    async def __anext__(self) -> Deliver:
        if self._call.is_over:
            raise StopAsyncIteration
        while True:
            self._has_output.clear()
            delivery = self._call.poll()
            if delivery is not None:
                return delivery
            await self._has_output.wait()

    def await_ends(self) -> None:
        """Iterating gives what comes of a completion when that has ended, instead of every step."""
        self._call.await_ends()

    def unread(self) -> Iterator[Deliver]:
        """What has come and was not given yet. Raises as iterating does."""
        while (delivery := self._call.poll()) is not None:
            yield delivery

    async def outputs(self) -> list[Deliver]:
        """Every completion in one delivery, by its number."""
        self.await_ends()
        pieces: list[list[Deliver]] = [[] for _ in range(self._call.num_completions)]
        async for delivery in self:
            pieces[delivery.sequence_index].append(delivery)
        return [merged(deliveries) for deliveries in pieces]

    async def whole(self) -> CompletedRequest:
        """All completions; with `best_of`, the best ones, best first."""
        completions = self.completions(await self.outputs())
        return CompletedRequest(
            request_id=self.request_id, model=self.model, completions=completions, usage=self._call.usage
        )

    def completions(self, outputs: Sequence[Deliver]) -> tuple[Completion, ...]:
        """What is told of all outputs in the end, each in one delivery."""
        chosen = self._chosen(outputs) if is_ranked(self._params) else outputs
        return tuple(self._completion(output) for output in chosen)

    def _chosen(self, outputs: Sequence[Deliver]) -> list[Deliver]:
        """The best, renumbered. What is said of the prompt goes with the first, whoever said it."""
        ranking = best([[item.logprob for item in output.logprobs] for output in outputs], self._params.n)
        said = outputs[0].prompt_logprobs
        return [
            replace(outputs[index], sequence_index=number, prompt_logprobs=said if number == 0 else ())
            for number, index in enumerate(ranking)
        ]

    def _completion(self, output: Deliver) -> Completion:
        """Log-probabilities that only the ranking needed are not delivered; their sum is."""
        is_known = self._params.logprobs is not None or is_ranked(self._params)
        total = math.fsum(item.logprob for item in output.logprobs) if is_known else None
        kept = output if self._params.logprobs is not None else replace(output, logprobs=())
        return Completion(output=kept, cumulative_logprob=total)
