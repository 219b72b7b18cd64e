"""Response of one request: its output deltas as an async iterator, or its completions as a whole."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.router.dispatch.output_stream import merged
from holdfast.router.dispatch.parallel_sampling import best, is_ranked
from holdfast.router.dispatch.request_stream import RequestStream
from holdfast.router.events import OutputDelta, TextState, Usage
from holdfast.router.requests.request_stats import RequestWatch
from holdfast.router.text.stop_strings import stop_reason
from holdfast.worker.request import FinishReason, RequestKey, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedSequence:
    """The whole output of one sequence."""

    output: OutputDelta
    cumulative_logprob: float | None = None
    """The sum of the tokens' log-probabilities, if they are known."""
    stop_reason: str | int | None = None
    """The stop string or the stop token of the request that has ended it, if one has."""
    candidates: Sequence[Sequence[tuple[int, float]]] = ()
    """Only of a beam: for each of its tokens, the likeliest (token id, logprob) at that position, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """All completions of a request, and its usage."""

    request_id: str
    model: str
    completions: tuple[CompletedSequence, ...]
    usage: Usage


class AnswerSink:
    """The sink of an answer, which one task reads: what its `take` refuses wakes the task. On one event loop.

    It wakes as an `asyncio.Event`, which is for any number of tasks and takes several calls to set, to clear and to
    wait for. An answer does all three for every token that was not taken.
    """

    __slots__ = ("_loop", "is_set", "take", "waiter")

    def __init__(self) -> None:
        self.is_set = False
        """There may be output that was not read."""
        self.take: Callable[[OutputDelta], bool] = lambda delta: False
        """Sends a delta to the client, or returns False and leaves it to the task. It must return False where `waiter`
        is done: while the task waits, it has sent all before.
        """
        self._loop = asyncio.get_running_loop()
        self.waiter = self._loop.create_future()
        """What the task waits for; done where it does not wait."""
        self.waiter.cancel()

    def notify(self) -> None:
        self.is_set = True
        if not self.waiter.done():
            self.waiter.set_result(None)

    def next(self) -> "asyncio.Future[None]":
        """Is done when `is_set` is, which it must not be yet."""
        self.waiter = self._loop.create_future()
        return self.waiter


class SampledAnswer:
    """The response to a sampling request, for one task, which either iterates over it or awaits `whole`.

    Iterating gives what `RequestStream.poll` gives, and raises what it raises, as soon as there is output that
    `sink` has not taken.
    """

    def __init__(
        self,
        call: RequestStream,
        sink: AnswerSink,
        model: str,
        params: SamplingParams,
        prompt_token_ids: tuple[int, ...] = (),
        received: tuple[OutputDelta, ...] = (),
        watch: RequestWatch | None = None,
        texts: Sequence[TextState] = (),
        echo: str = "",
    ) -> None:
        self.echo = echo
        """The prompt's text, with which each completion begins."""
        self.request_id = call.request_id
        self.model = model
        self.prompt_token_ids = prompt_token_ids
        """The tokens of the prompt that truncation has left."""
        self.received = received
        """What the client of a resumed request has already, one delivery for each sequence of which it has any."""
        self._call = call
        self.sink = sink
        self.params = params
        self._watch = watch
        self._texts = texts

    @property
    def is_over(self) -> bool:
        """Every sequence has been read to its end."""
        return self._call.is_over

    def read(self) -> OutputDelta | None:
        """Output that is there, if any, without waiting: for a reader that waits for `sink` itself, and for no
        iterator. Raises as iterating does.
        """
        call, sink = self._call, self.sink
        sink.is_set = False
        delivery = call.poll()
        if delivery is not None:
            sink.is_set = call.has_more
        return delivery

    def __aiter__(self) -> "SampledAnswer":
        return self

    async def __anext__(self) -> OutputDelta:
        if self._call.is_over:
            raise StopAsyncIteration
        while True:
            if not self.sink.is_set:
                await self.sink.next()
            if (delivery := self.read()) is not None:
                return delivery

    def abort(self) -> bool:
        """As `RequestStream.abort`."""
        return self._call.abort()

    def await_ends(self, on_first_token: Callable[[], None] | None = None) -> None:
        """From here on iterating gives the output of a sequence when it has ended, not at every step.

        `on_first_token` is called when the first token of all comes, if it has not come yet.
        """
        self._call.await_ends()
        if on_first_token is not None and self._watch is not None:
            self._watch.on_first_token = on_first_token

    def unread(self) -> Iterator[OutputDelta]:
        """The output that has arrived and was not returned yet, without waiting. Raises as iterating does."""
        while (delivery := self._call.poll()) is not None:
            yield delivery

    async def outputs(self) -> list[OutputDelta]:
        """The output of every sequence as one delivery, by sequence index."""
        self.await_ends()
        pieces: list[list[OutputDelta]] = [[] for _ in range(self._call.num_completions)]
        async for delivery in self:
            pieces[delivery.sequence_index].append(delivery)
        return [merged(deliveries) for deliveries in pieces]

    async def whole(self) -> CompletedRequest:
        """All completions; with `best_of`, the best ones, best first."""
        completions = self.completions(await self.outputs())
        return CompletedRequest(
            request_id=self.request_id, model=self.model, completions=completions, usage=self._call.usage
        )

    def stop_reason(self, index: int, delivery: OutputDelta) -> str | int | None:
        """What has ended sequence `index`, whose last delivery this is: a stop string or token of the request, or None
        for another end.
        """
        if delivery.finish_reason is not FinishReason.STOP:
            return None
        token_ids = delivery.token_ids
        for one in () if token_ids else self.received:
            if one.sequence_index == index:
                token_ids = one.token_ids
        matched = self._texts[index].matched if index < len(self._texts) else None
        return stop_reason(self.params, delivery.finish_reason, token_ids, matched)

    def completions(self, outputs: Sequence[OutputDelta]) -> tuple[CompletedSequence, ...]:
        """The completions to return, from the whole output of every sequence. Each output is one delivery."""
        completions = tuple(map(self._completion, outputs))
        return self._chosen(outputs, completions) if is_ranked(self.params) else completions

    def _chosen(
        self, outputs: Sequence[OutputDelta], completions: Sequence[CompletedSequence]
    ) -> tuple[CompletedSequence, ...]:
        """The best ones, with new indices. The prompt's log-probabilities, which sequence 0 has, go to the first."""
        ranking = best([[item.logprob for item in output.logprobs] for output in outputs], self.params.n)
        prompt_logprobs = outputs[0].prompt_logprobs
        return tuple(_as_number(number, completions[index], prompt_logprobs) for number, index in enumerate(ranking))

    def _completion(self, output: OutputDelta) -> CompletedSequence:
        """Log-probabilities that only the ranking needed are left out; their sum is kept."""
        is_known = self.params.logprobs is not None or is_ranked(self.params)
        total = math.fsum(item.logprob for item in output.logprobs) if is_known else None
        kept = output if self.params.logprobs is not None else output._replace(logprobs=())
        reason = self.stop_reason(output.sequence_index, output)
        return CompletedSequence(output=kept, cumulative_logprob=total, stop_reason=reason)


def _as_number(
    number: int, completion: CompletedSequence, prompt_logprobs: tuple[TokenLogprob, ...]
) -> CompletedSequence:
    """The completion with another index, the first of all with the prompt's log-probabilities."""
    first = prompt_logprobs if number == 0 else ()
    return replace(completion, output=completion.output._replace(sequence_index=number, prompt_logprobs=first))


class Abortable(Protocol):
    """An answer that may still be under way."""

    def abort(self) -> bool:
        """Ends it after what it has. Returns whether there was anything to end."""


class OpenAnswers:
    """Of several with one key, the newest counts: the others have been superseded."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[RequestKey, Abortable]] = {}
        """By request id, then by the rest of the key."""
        self._num_of_tenant: Counter[str] = Counter()

    @contextmanager
    def holding(self, answer: Abortable, key: RequestKey) -> Iterator[None]:
        """The answer can be aborted while the context is open."""
        self._answers.setdefault(key.request_id, {})[key] = answer
        self._num_of_tenant[key.tenant] += 1
        try:
            yield
        finally:
            self._drop(answer, key)
            self._num_of_tenant[key.tenant] -= 1
            if not self._num_of_tenant[key.tenant]:
                del self._num_of_tenant[key.tenant]

    def num_of(self, tenant: str) -> int:
        """Open answers of a tenant."""
        return self._num_of_tenant.get(tenant, 0)

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Ends all answers of this id, of one `tenant` or of all. Without any, `ID/N` names part N of the id.

        Returns whether one was under way.
        """
        named = self._named(request_id, tenant)
        if not named:
            whole, _, part = request_id.rpartition("/")
            named = [key for key in self._named(whole, tenant) if str(key.part) == part]
        were_open = [self._answers[key.request_id][key].abort() for key in named]
        return any(were_open)

    def _named(self, request_id: str, tenant: str | None) -> list[RequestKey]:
        return [key for key in self._answers.get(request_id, ()) if tenant in (None, key.tenant)]

    def _drop(self, answer: Abortable, key: RequestKey) -> None:
        answers = self._answers.get(key.request_id, {})
        if answers.get(key) is answer:
            del answers[key]
            if not answers:
                del self._answers[key.request_id]
