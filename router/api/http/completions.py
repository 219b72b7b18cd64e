"""Endpoint `/v1/completions`: one prompt or several, as text or token ids, answered whole or as a stream of chunks.

Several prompts become several requests, which are answered side by side: choice `i * n + j` is completion j of prompt
i.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from holdfast.router.api.http.bodies import CompletionBody
from holdfast.router.api.http.choices import (
    TokenNames,
    completion_logprobs,
    finish_of,
    prompt_logprobs_of,
    usage_of,
)
from holdfast.router.api.http.event_stream import DONE, PLACE, Frame, event_of, frame_of, json_text
from holdfast.router.api.http.sampling import completion_params, scores_only, service_of
from holdfast.router.api.http.tokens_with_text import TextOffsets, TokensWithText
from holdfast.router.generation import Generation, OutputDelta, Usage, together
from holdfast.router.request import GenerationRequest, naming
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.beam_search import BeamAnswer
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import TokenLogprob

MAX_PROMPTS: Final = 1024  # of one request


def completion_requests(body: CompletionBody, tenant: str = "") -> list[GenerationRequest]:
    """A request for each prompt. Raises `InvalidRequestError`, naming the field."""
    with naming(body.names):
        params = completion_params(body)
        prompts = prompts_of(body)
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", len(prompts), f"must be at most {MAX_PROMPTS} prompts")
        service = service_of(body, tenant)
        return [GenerationRequest(prompt=prompt, sampling_params=params, **service) for prompt in prompts]


def prompts_of(body: CompletionBody) -> Sequence[str | tuple[int, ...]]:
    """The prompts: a text, texts, token ids, or several lists of them."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("prompt", given, "must not be empty")
    if isinstance(given[0], int):
        return [tuple(given)]
    return [item if isinstance(item, str) else tuple(item) for item in given]


def completion_id(request_id: str) -> str:
    return f"cmpl-{request_id}"


class Completions:
    """The response to one body, whose prompts' answers are `answers`."""

    def __init__(
        self,
        body: CompletionBody,
        answers: Sequence[SampledAnswer | BeamAnswer],
        created: int,
        tokenizer: Tokenizer,
    ) -> None:
        self.num_events = 0
        self._usages: list[Usage] = []
        self._over: set[int] = set()
        self._num_tokens = 0
        self._body = body
        self._answers = answers
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer.tokens, bool(body.return_tokens_as_token_ids))
        self._per_prompt = body.given("n") or 1
        self._lengths: dict[int, int] = {}
        """Length of the text, by choice that has begun."""
        self._offsets: dict[int, TextOffsets] = {}
        """Text offsets by choice, where log-probabilities are requested."""
        self._waiting: dict[int, TokensWithText] = {}
        """Tokens that wait for their text, by choice of a stream."""
        self._tells_logprobs = body.given("logprobs") is not None
        self._order = _PromptsFirst(len(answers)) if self._per_prompt > 1 and self._tells_prompts else None
        self._is_plain = not (
            body.tells_usage_always
            or body.return_token_ids
            or scores_only(body)
            or self._tells_logprobs
            or body.given("prompt_logprobs") is not None
        )
        self._plain: dict[tuple[int, str], Frame] = {}
        """Frame of plain chunks, by choice and fingerprint."""
        self._head: dict[str, Any] = {
            "id": completion_id(answers[0].request.request_id),
            "object": "text_completion",
            "created": created,
            "model": answers[0].model,
        }

    async def whole(self) -> dict[str, Any]:
        """The whole response."""
        completed = await _all_of(self._answers)
        choices = [
            self._whole_choice(number, one, item) for number, one in enumerate(completed) for item in one.completions
        ]
        usage = together([one.usage for one in completed], share_prompt=False)
        fingerprint = completed[0].system_fingerprint or None
        return {**self._head, "choices": choices, "usage": usage_of(usage), "system_fingerprint": fingerprint}

    def _whole_choice(self, number: int, request: Generation, item: OutputDelta) -> dict[str, Any]:
        """The prompt's log-probabilities, which the first completion has, are those of all."""
        output = item._replace(prompt_logprobs=request.prompt_logprobs)
        choice = self._choice(self._numbered(number, output), self._answers[number])
        return {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None, **choice}

    def of(self, delta: OutputDelta) -> bytes:
        """The chunk of a delta that is numbered as its choice is; of the last one of all the usage as well."""
        index, events = delta.sequence_index, b""
        if delta.usage is not None:
            self._usages.append(delta.usage)
        if index not in self._over and (ready := self._with_text(delta)) is not None:
            plain = self.plain(ready) if ready.finish_reason is None else None
            events = plain or self._chunk(ready)
        if delta.finish_reason is not None:
            self._over.add(index)
        return events

    def plain(self, delta: OutputDelta) -> bytes | None:
        index, fingerprint, text = delta.sequence_index, delta.system_fingerprint, delta.text
        if delta.logprobs or not self._is_plain or index not in self._lengths:
            return None
        frame = self._plain.get((index, fingerprint))
        if frame is None:
            said = self._chunk(delta._replace(text=PLACE))
            self._lengths[index] -= len(PLACE)
            frame = self._plain[index, fingerprint] = frame_of(said)
        self._lengths[index] += len(text)
        return b"%b%b%b" % (frame[0], json_text(text).encode(errors="replace"), frame[1])

    def holds(self, choice: int) -> bool:
        """Whether tokens of a choice wait for their text."""
        return choice in self._waiting and self._waiting[choice].holds

    async def end(self) -> bytes:
        """The usage of all prompts, and that it is done."""
        if not self._body.tells_usage:
            return DONE
        usage = together(self._usages, share_prompt=False)
        return event_of({**self._head, "choices": [], "usage": usage_of(usage)}) + DONE

    def numbered(self) -> AsyncIterator[OutputDelta]:
        """The deltas of all answers, numbered as their choices are."""
        streamed = [answer for answer in self._answers if isinstance(answer, SampledAnswer)]
        assert len(streamed) == len(self._answers), "beam searches are not streamed"
        return streamed[0] if len(streamed) == 1 and self._order is None else self._of_all(streamed)

    async def _of_all(self, streamed: Sequence[SampledAnswer]) -> AsyncIterator[OutputDelta]:
        order = self._order
        for number, answer in enumerate(streamed):
            if order is not None and any(one.sequence_index == 0 for one in answer.received):
                order.has_begun(number)
        async for number, delta in _side_by_side(streamed):
            for one in [delta] if order is None else order.of(number, delta):
                yield self._numbered(number, one)

    def _with_text(self, delta: OutputDelta) -> OutputDelta | None:
        """Like `TokensWithText`, where text may be held back behind its tokens."""
        index = delta.sequence_index
        answer = self._answers[index // self._per_prompt]
        params = answer.request.sampling_params
        if not self._tells_logprobs or not params.stop_strings or not params.detokenize:
            return delta
        if index not in self._waiting:
            self._waiting[index] = TokensWithText(self._new_offsets(answer))
        return self._waiting[index].of(delta)

    def _new_offsets(self, answer: SampledAnswer | BeamAnswer) -> TextOffsets:
        start, request = len(answer.echo), answer.request
        return TextOffsets(self._tokenizer, request.sampling_params, request.prompt_token_ids, start=start)

    def received(self) -> Iterator[OutputDelta]:
        """Output that the client of a resumed request has already, numbered as choices are."""
        for number, answer in enumerate(self._answers):
            if isinstance(answer, SampledAnswer):
                yield from (self._numbered(number, delta) for delta in answer.received)

    def _chunk(self, delta: OutputDelta) -> bytes:
        choice = self._choice(delta, self._answers[delta.sequence_index // self._per_prompt])
        chunk = {**self._head, "choices": [choice], "system_fingerprint": delta.system_fingerprint or None}
        self._num_tokens += len(delta.token_ids)
        if self._body.tells_usage_always:
            num_prompt_tokens = sum(len(answer.request.prompt_token_ids) for answer in self._answers)
            so_far = Usage(num_prompt_tokens=num_prompt_tokens, num_completion_tokens=self._num_tokens)
            chunk["usage"] = usage_of(so_far)
        elif self._body.tells_usage:
            chunk["usage"] = None
        return event_of(chunk)

    def _numbered(self, number: int, delta: OutputDelta) -> OutputDelta:
        index = number * self._per_prompt + delta.sequence_index
        return delta if index == delta.sequence_index else delta._replace(sequence_index=index)

    @property
    def _tells_prompts(self) -> bool:
        """Whether choices contain log-probabilities of their prompts."""
        return self._body.given("prompt_logprobs") is not None or bool(
            self._body.given("echo") and self._tells_logprobs
        )

    def _choice(self, output: OutputDelta, answer: SampledAnswer | BeamAnswer) -> dict[str, Any]:
        index, text = output.sequence_index, output.text
        is_first = index not in self._lengths
        if scores_only(self._body):  # the addition of the one drawn token is left out
            text = answer.echo if is_first else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(output, answer, len(text)) if self._tells_logprobs else None,
            "finish_reason": finish_of(output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        self._lengths[index] = self._lengths.get(index, 0) + len(text)
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(answer.request.prompt_token_ids)
        if self._body.given("prompt_logprobs") is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs_of(output.prompt_logprobs, self._names.tokens)
        return choice

    def _logprobs(
        self, output: OutputDelta, answer: SampledAnswer | BeamAnswer, num_chars: int
    ) -> dict[str, Any] | None:
        """Log-probabilities of a delta's tokens, whose text has `num_chars` characters, and of the prompt's where it is
        echoed.
        """
        index, said, places = output.sequence_index, list[TokenLogprob | None](), list[int]()
        if index not in self._offsets:
            self._offsets[index] = self._new_offsets(answer)
        has_prompt = bool(output.prompt_logprobs) or len(answer.request.prompt_token_ids) == 1
        if self._body.given("echo") and index not in self._lengths and has_prompt:
            said, places = list(output.prompt_logprobs or (None,)), self._prompt_offsets(answer)
        offsets = [self._offsets[index].push(token_id) for token_id in output.token_ids]
        if output.finish_reason is not None:  # a stop string is not part of the text
            most = self._lengths.get(index, 0) + num_chars
            offsets = [min(at, most) for at in offsets]
        if not scores_only(self._body) and output.logprobs:
            said += output.logprobs
            places += offsets
        first = answer.request.prompt_token_ids[0] if answer.request.prompt_token_ids else 0
        return completion_logprobs(said, self._names, text_offsets=places, first_token_id=first)

    def _prompt_offsets(self, answer: SampledAnswer | BeamAnswer) -> list[int]:
        offsets = TextOffsets(self._tokenizer, answer.request.sampling_params, text=answer.echo)
        return [min(offsets.push(token_id), len(answer.echo)) for token_id in answer.request.prompt_token_ids]


class _PromptsFirst:
    """Holds back the first deltas of a prompt's choices until that of its first one, which alone has the prompt's
    log-probabilities: they are those of all.
    """

    def __init__(self, num_prompts: int) -> None:
        self._known: list[tuple[TokenLogprob | None, ...] | None] = [None] * num_prompts
        self._held: list[list[OutputDelta]] = [[] for _ in range(num_prompts)]

    def has_begun(self, number: int) -> None:
        """The client of a resumed stream has the first choice's beginning."""
        self._known[number] = ()

    def of(self, number: int, delta: OutputDelta) -> list[OutputDelta]:
        """Deliveries that can be sent now."""
        if self._known[number] is None:
            if delta.sequence_index:
                self._held[number].append(delta)
                return []
            self._known[number] = delta.prompt_logprobs
        ready, self._held[number] = [delta, *self._held[number]], []
        return [self._with_prompt(number, one) for one in ready]

    def _with_prompt(self, number: int, delta: OutputDelta) -> OutputDelta:
        known = self._known[number]
        return delta._replace(prompt_logprobs=known) if delta.first_token_index == 0 and known else delta


async def _all_of(answers: Sequence[SampledAnswer | BeamAnswer]) -> list[Generation]:
    """All completed requests; the first error ends the others."""
    tasks = [asyncio.create_task(answer.whole()) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        while tasks:  # an error's traceback has this frame: tasks that stay in it would be a cycle
            tasks.pop().cancel()


async def _side_by_side(answers: Sequence[SampledAnswer]) -> AsyncIterator[tuple[int, OutputDelta]]:
    """The deltas of several answers as they come, with the number of each one's answer."""
    arrived: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue(maxsize=len(answers))
    async with AsyncExitStack() as stack:
        for number, answer in enumerate(answers):
            task = asyncio.create_task(_pump(number, answer, arrived))
            stack.callback(task.cancel)
        num_open = len(answers)
        while num_open:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item


async def _pump(
    number: int, answer: SampledAnswer, arrived: "asyncio.Queue[tuple[int, OutputDelta] | BaseException | None]"
) -> None:
    try:
        async for delta in answer:
            await arrived.put((number, delta))
        await arrived.put(None)
    except Exception as error:  # noqa: BLE001 - whatever it is, the reader of all of them raises it
        await arrived.put(error)
