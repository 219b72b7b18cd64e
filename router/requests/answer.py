"""Response of one request: its output deltas as an async iterator, or its completions as a whole."""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from holdfast.router.dispatch.request_state import RequestState, best
from holdfast.router.dispatch.request_stream import RequestStream, merged
from holdfast.router.generation import Generation, OutputDelta
from holdfast.router.requests.request_stats import AdmittedRequest
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import RequestKey


class SampledAnswer(RequestStream):
    """The response to a sampling request, for one task, which either iterates over it or awaits `whole`. It is the sink
    of its streams: output that `take` refuses wakes the task. On one event loop.

    Iterating gives the results of `poll`, and raises its errors, as soon as there is untaken output. The
    task is woken as by an `asyncio.Event`, which is for any number of tasks and takes several calls to set, to clear
    and to wait for: an answer does all three for every token that was not taken.
    """

    def __init__(self, admitted: AdmittedRequest) -> None:
        super().__init__(admitted.request)
        self.admitted = admitted
        self.model = admitted.named_model
        self.echo = admitted.echo
        """The prompt's text, with which each completion begins."""
        self.received: Sequence[OutputDelta] = ()
        """Output that the client of a resumed request has, one delta for each sequence of which it has any."""
        self.sequences: Sequence[RequestState] = ()
        """Sequences by index."""
        self._pieces = defaultdict[int, list[OutputDelta]](list)
        """Output of each sequence that `outputs` has read."""
        self.is_set = False
        """There may be output that was not read."""
        self.take: Callable[[OutputDelta], bool] = _not_taken
        """Sends a delta to the client, or returns False and leaves it to the task. It must return False where `waiter`
        is done: while the task waits, it has sent all before.
        """
        params = admitted.request.sampling_params
        self._is_ranked = params.num_sequences > params.n
        """Whether nothing can be returned before all sequences have ended, because the best are chosen then."""
        self._loop = asyncio.get_running_loop()
        self.waiter = self._loop.create_future()
        """Future that the task waits for; done if it does not wait."""
        self.waiter.cancel()

    def close(self) -> None:
        super().close()
        self.take = _not_taken  # who writes may hold the answer in turn

    def notify(self) -> None:
        self.is_set = True
        if not self.waiter.done():
            self.waiter.set_result(None)

    def next(self) -> "asyncio.Future[None]":
        """Is done when `is_set` is, which it must not be yet."""
        self.waiter = self._loop.create_future()
        return self.waiter

    def read(self) -> OutputDelta | None:
        """Output that is there, if any, without waiting: for a reader that waits by `next` itself, and for no iterator.
        Raises as iterating does.
        """
        self.is_set = False
        delta = self.poll()
        if delta is not None:
            self.is_set = self.has_more
        return delta

    def __aiter__(self) -> "SampledAnswer":
        return self

    async def __anext__(self) -> OutputDelta:
        if self.is_over:
            raise StopAsyncIteration
        while True:
            if not self.is_set:
                await self.next()
            if (delta := self.read()) is not None:
                return delta

    async def outputs(self, on_delta: Callable[[], None] | None = None) -> list[OutputDelta]:
        """The output of every sequence as one delta, by sequence index, when all have ended. `on_delta` is called
        whenever there is more of it before that; without it the task is woken by ends alone.
        """
        if on_delta is None:
            for stream in self.streams:
                stream.notifies_each_step = False
        pieces = self._pieces
        while not self.is_over:
            if not self.is_set:
                await self.next()
            if (delta := self.read()) is not None:
                pieces[delta.sequence_index].append(delta)
                if on_delta is not None and not self.is_over:
                    on_delta()
        return self.so_far()

    def so_far(self) -> list[OutputDelta]:
        """Output of every sequence that `outputs` has read, as one delta each."""
        found = []
        for index in range(len(self.streams)):
            if not (pieces := self._pieces[index]):
                pieces.append(OutputDelta(self.request.request_id, 0, (), "", sequence_index=index))
            found.append(merged(pieces))
            pieces[:] = found[-1:]
        return found

    def read_rest(self) -> list[OutputDelta]:
        """Like `so_far`, with the output that has arrived and was not read yet. Never raises, whatever has ended it."""
        with suppress(HoldfastError):
            while (delta := self.poll()) is not None:
                self._pieces[delta.sequence_index].append(delta)
        return self.so_far()

    async def whole(self) -> Generation:
        """All completions; with `best_of`, the best ones, best first."""
        completions = self.completions(await self.outputs())
        return Generation(
            request_id=self.request.request_id, model=self.model, completions=completions, usage=self.usage
        )

    def completions(self, outputs: Sequence[OutputDelta]) -> tuple[OutputDelta, ...]:
        """The completions to return, from the whole output of every sequence. Each output is one delta."""
        if self.request.sampling_params.logprobs is None and not self._is_ranked:
            return tuple(outputs)
        completions = tuple(map(self._completion, outputs))
        return self._chosen(outputs, completions) if self._is_ranked else completions

    def _chosen(self, outputs: Sequence[OutputDelta], completions: Sequence[OutputDelta]) -> tuple[OutputDelta, ...]:
        """The best ones, with new indices. The prompt's log-probabilities, which sequence 0 has, go to the first."""
        ranking = best(
            [[item.logprob for item in output.logprobs] for output in outputs], self.request.sampling_params.n
        )
        of_prompt = (outputs[0].prompt_logprobs, *[()] * len(ranking))
        return tuple(
            completions[index]._replace(sequence_index=number, prompt_logprobs=of_prompt[number])
            for number, index in enumerate(ranking)
        )

    def _completion(self, output: OutputDelta) -> OutputDelta:
        """Log-probabilities that only the ranking needed are left out; their sum is kept."""
        is_asked_for = self.request.sampling_params.logprobs is not None
        total = math.fsum([item.logprob for item in output.logprobs])
        return output._replace(cumulative_logprob=total, logprobs=output.logprobs if is_asked_for else ())


def _not_taken(delta: OutputDelta) -> bool:
    return False


class Abortable(Protocol):
    """An answer that may still be under way."""

    def abort(self) -> bool:
        """Ends the request with its output so far. Returns whether it was running."""


class OpenAnswers:
    """Open answers by key. Of several with one key, the newest counts: the others have been superseded."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[RequestKey, Abortable]] = {}
        """Answers by request id, then by the rest of the key."""
        self._num_of_tenant: Counter[str] = Counter()

    def add(self, answer: Abortable, key: RequestKey) -> None:
        """Makes the answer abortable, until `drop`."""
        self._answers.setdefault(key.request_id, {})[key] = answer
        self._num_of_tenant[key.tenant] += 1

    def drop(self, answer: Abortable, key: RequestKey) -> None:
        """Removes an answer that is over."""
        answers = self._answers.get(key.request_id, {})
        if answers.get(key) is answer:
            del answers[key]
            if not answers:
                del self._answers[key.request_id]
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
