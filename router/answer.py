"""The answer to one client's request: its completions, read together as they are drawn, or all at once.

What may live here: joining the streams of siblings, and what is told of them in the end. What may not: gRPC, and how a
completion comes about.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.events import Deliver, Usage
from router.parallel_sampling import best, is_ranked, merged_usage
from router.stream import OutputStream, merged
from worker.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole output."""

    output: Deliver
    cumulative_logprob: float | None = None
    """The sum over the tokens, where their log-probabilities are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that a request has come to."""

    request_id: str
    model: str
    completions: tuple[Completion, ...]
    usage: Usage


class SampledAnswer:
    """The streams of a request's siblings as one. For one reader, which either iterates or asks for the whole.

    Iterating gives deliveries of all completions as they come, told apart by `sequence_index`. The usage is on the very
    last one. What ends one completion with an error is raised, and so ends them all.
    """

    def __init__(
        self, request_id: str, model: str, params: SamplingParams, streams: Sequence[OutputStream], echo: str = ""
    ) -> None:
        self.request_id = request_id
        self.model = model
        self._params = params
        self._echo = echo
        self._streams = dict(enumerate(streams))
        """Those that have not ended. The one that was read last is at the end."""
        self._usages: list[Usage] = []
        self._news = asyncio.Event()
        for stream in streams:
            stream.announce_to(self._news)

    def __aiter__(self) -> "SampledAnswer":
        return self

    async def __anext__(self) -> Deliver:
        if not self._streams:
            raise StopAsyncIteration
        while (found := self._poll()) is None:
            await self._news.wait()
        return found

    async def whole(self) -> Answer:
        """All completions; with `best_of`, the best ones, best first. Raises what ended one of them with an error."""
        pieces: list[list[Deliver]] = [[] for _ in self._streams]
        async for delivery in self:
            pieces[delivery.sequence_index].append(delivery)
        outputs = [merged(deliveries) for deliveries in pieces]
        chosen = self._chosen(outputs) if is_ranked(self._params) else outputs
        return Answer(
            request_id=self.request_id,
            model=self.model,
            completions=tuple(self._completion(output) for output in chosen),
            usage=merged_usage(self._usages),
        )

    def _poll(self) -> Deliver | None:
        self._news.clear()
        for index, stream in self._streams.items():
            delivery = stream.poll()
            if delivery is not None:
                del self._streams[index]
                if delivery.finish_reason is None:
                    self._streams[index] = stream
                return self._told(index, delivery)
        return None

    def _told(self, index: int, delivery: Deliver) -> Deliver:
        """A sibling's delivery in the words of the request."""
        if delivery.usage is not None:
            self._usages.append(delivery.usage)
        begins = delivery.first_token_index == 0
        return replace(
            delivery,
            request_id=self.request_id,
            sequence_index=index,
            text=self._echo + delivery.text if begins else delivery.text,
            usage=None if self._streams else merged_usage(self._usages),
        )

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
