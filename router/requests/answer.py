"""Response of one request: its output deltas as an async iterator, or its completions as a whole.

What may live here: waiting for output of a call, and making completions of it. What may not: gRPC, and how the
sequences of a request are opened and merged (`router/dispatch/call.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.router.dispatch.call import Call
from holdfast.router.dispatch.output_stream import Taker, merged
from holdfast.router.dispatch.parallel_sampling import best, is_ranked
from holdfast.router.events import Deliver, Usage
from holdfast.router.requests.output_signal import OutputSignal
from holdfast.worker.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedSequence:
    """The whole output of one sequence."""

    output: Deliver
    cumulative_logprob: float | None = None
    """The sum of the tokens' log-probabilities, if they are known."""
    candidates: Sequence[Sequence[tuple[int, float]]] = ()
    """Only of a beam: for each of its tokens, the likeliest (token id, logprob) at that position, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """All completions of a request, and its usage."""

    request_id: str
    model: str
    completions: tuple[CompletedSequence, ...]
    usage: Usage


class SampledAnswer:
    """The response to a sampling request, for one task, which either iterates over it or awaits `whole`.

    Iterating gives what `Call.poll` gives, and raises what it raises, as soon as there is output. `has_output` is set
    by the call's `on_output`.
    """

    def __init__(
        self,
        call: Call,
        has_output: OutputSignal,
        model: str,
        params: SamplingParams,
        prompt_token_ids: tuple[int, ...] = (),
        sent_texts: Sequence[str] = (),
        received: tuple[Deliver, ...] = (),
    ) -> None:
        self.request_id = call.request_id
        self.model = model
        self.prompt_token_ids = prompt_token_ids
        """The tokens of the prompt that truncation has left."""
        self.sent_texts = sent_texts
        """Of a resumed request: the text of each completion that its client has."""
        self.received = received
        """What the client of a resumed request has already, one delivery for each sequence."""
        self._call = call
        self.has_output = has_output
        self._params = params

    @property
    def is_over(self) -> bool:
        """Every sequence has been read to its end."""
        return self._call.is_over

    def hand_to(self, taker: Taker) -> None:
        """As `Call.hand_to`: `taker` is, or asks, this answer's `has_output.give`, and so takes nothing out of turn."""
        self._call.hand_to(taker)

    def read(self) -> Deliver | None:
        """Output that is there, if any, without waiting: for a reader that waits for `has_output` itself, and for no
        iterator. Raises as iterating does.
        """
        call, has_output = self._call, self.has_output
        has_output.is_set = False
        delivery = call.poll()
        if delivery is not None:
            has_output.is_set = call.has_more
        return delivery

    def __aiter__(self) -> "SampledAnswer":
        return self

    async def __anext__(self) -> Deliver:
        if self._call.is_over:
            raise StopAsyncIteration
        while True:
            if not self.has_output.is_set:
                await self.has_output.next()
            if (delivery := self.read()) is not None:
                return delivery

    def abort(self) -> bool:
        """As `Call.abort`."""
        return self._call.abort()

    def await_ends(self, on_first_output: Callable[[], None] | None = None) -> None:
        """From here on iterating gives the output of a sequence when it has ended, not at every step.

        `on_first_output` as for `Call.await_ends`.
        """
        self._call.await_ends(on_first_output)

    def unread(self) -> Iterator[Deliver]:
        """The output that has arrived and was not returned yet, without waiting. Raises as iterating does."""
        while (delivery := self._call.poll()) is not None:
            yield delivery

    async def outputs(self) -> list[Deliver]:
        """The output of every sequence as one delivery, by sequence index."""
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

    def completions(self, outputs: Sequence[Deliver]) -> tuple[CompletedSequence, ...]:
        """The completions to return, from the whole output of every sequence. Each output is one delivery."""
        chosen = self._chosen(outputs) if is_ranked(self._params) else outputs
        return tuple(self._completion(output) for output in chosen)

    def _chosen(self, outputs: Sequence[Deliver]) -> list[Deliver]:
        """The best outputs, with new indices. The prompt's log-probabilities, which sequence 0 has, go to the first."""
        ranking = best([[item.logprob for item in output.logprobs] for output in outputs], self._params.n)
        prompt_logprobs = outputs[0].prompt_logprobs
        return [
            outputs[index]._replace(sequence_index=number, prompt_logprobs=prompt_logprobs if number == 0 else ())
            for number, index in enumerate(ranking)
        ]

    def _completion(self, output: Deliver) -> CompletedSequence:
        """Log-probabilities that only the ranking needed are left out; their sum is kept."""
        is_known = self._params.logprobs is not None or is_ranked(self._params)
        total = math.fsum(item.logprob for item in output.logprobs) if is_known else None
        kept = output if self._params.logprobs is not None else output._replace(logprobs=())
        return CompletedSequence(output=kept, cumulative_logprob=total)
