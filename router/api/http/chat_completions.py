"""Endpoint `/v1/chat/completions`: a chat as OpenAI's clients send it,
and its answer whole or as a stream of chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.router.api.chat_answer import call_prefix
from holdfast.router.api.http.bodies import ChatBody, ChatFields
from holdfast.router.api.http.choices import (
    TokenNames,
    chat_logprobs,
    delta_of,
    finish_after_calls,
    num_reasoning_tokens,
    prompt_logprobs_of,
    usage_of,
    whole_message,
)
from holdfast.router.api.http.event_stream import DONE, PLACE, Frame, event_of, frame_of, json_text
from holdfast.router.api.http.sampling import chat_params, service_of
from holdfast.router.chat import Chat, plain_message
from holdfast.router.dispatch.request_stream import merged
from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.router.request import GenerationRequest, naming
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.text.token_table import TokenTable
from holdfast.router.tools.call_events import CallEvent
from holdfast.router.tools.chat_style import ChatReader, Reasoning

NewReader: TypeAlias = Callable[[], ChatReader | None]
"""Makes what reads one choice's text; None where it is content as it stands."""


def chat_request(body: ChatBody, tenant: str = "") -> GenerationRequest:
    """The request that a body makes. Raises `InvalidRequestError`, naming the field."""
    with naming(body.names):
        return GenerationRequest(
            chat=chat_of(body, body.messages), sampling_params=chat_params(body), **service_of(body, tenant)
        )


def chat_of(body: ChatFields, messages: list[dict[str, Any]]) -> Chat:
    """The chat of a body and its messages."""
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        effort = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        variables = effort | variables
    if body.verbosity is not None:
        variables.setdefault("verbosity", body.verbosity)
    return Chat(
        messages=messages,
        template_kwargs=variables,
        tools=body.tools or (),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        split_reasoning=True,
        continue_final_message=bool(body.continue_final_message),
        template=body.chat_template or "",
    )


def _echo(body: ChatBody) -> str:
    """Text that the answer begins with under `echo`: the last message, if the answer continues in its role."""
    last = body.messages[-1] if body.echo else {}
    goes_on = body.continue_final_message or body.add_generation_prompt is False
    if not body.echo or not (goes_on or last.get("role") == "assistant"):
        return ""
    return str(plain_message(last, f"messages[{len(body.messages) - 1}]")["content"])


def chat_id(request_id: str) -> str:
    return f"chatcmpl-{request_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatView:
    """Inputs of an answer to a body, besides the output."""

    body: ChatBody
    created: int
    tokens: TokenTable
    new_reader: NewReader
    prompt_text: str | None = None
    """The prompt, if the answer contains it."""

    @property
    def names(self) -> TokenNames:
        return TokenNames(self.tokens, bool(self.body.return_tokens_as_token_ids))

    def tells_tokens(self, reader: ChatReader | None) -> bool:
        """Whether single tokens are sent: hidden reasoning could be read from them."""
        return not (self.body.hides_reasoning and reader is not None)

    def read(self, events: list[Reasoning | CallEvent]) -> list[Reasoning | CallEvent]:
        """The events of a reader that are sent."""
        if self.body.hides_reasoning:
            return [event for event in events if not isinstance(event, Reasoning)]
        return events

    def of_prompt(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Requested fields about the prompt, without its log-probabilities."""
        ids = {"prompt_token_ids": list(prompt_token_ids)} if self.body.return_token_ids else {}
        return ids if self.prompt_text is None else {**ids, "prompt_text": self.prompt_text}


def whole_chat(view: ChatView, completed: Generation, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
    """The whole response."""
    body = view.body
    readers = [view.new_reader() for _ in completed.completions]
    response: dict[str, Any] = {
        "id": chat_id(completed.request_id),
        "object": "chat.completion",
        "created": view.created,
        "model": completed.model,
        "choices": [_whole_choice(view, *one) for one in zip(completed.completions, readers, strict=True)],
        "usage": usage_of(completed.usage, num_reasoning_tokens(readers)),
        "system_fingerprint": completed.system_fingerprint or None,
        "service_tier": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        **view.of_prompt(prompt_token_ids),
    }
    if body.given("prompt_logprobs") is not None:
        response["prompt_logprobs"] = prompt_logprobs_of(completed.prompt_logprobs, view.tokens)
    return response


def _whole_choice(view: ChatView, output: OutputDelta, reader: ChatReader | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None, "reasoning": None}
    if reader is not None:
        read = view.read([*reader.push(output.text, output.token_ids), *reader.finish()])
        message |= whole_message(call_prefix(output.request_id, output.sequence_index), read)
    if echo := _echo(view.body):
        message["content"] = echo + (message["content"] or "")
    tells_tokens = view.tells_tokens(reader)
    return {
        "index": output.sequence_index,
        "message": message,
        "logprobs": chat_logprobs(output.logprobs, view.names) if tells_tokens else None,
        "finish_reason": finish_after_calls(output.finish_reason, reader),
        "stop_reason": output.stop_reason,
        "token_ids": list(output.token_ids) if view.body.return_token_ids and tells_tokens else None,
    }


class ChatChunks:
    """Writes the chunks of one stream. What all of them have in common is made once."""

    def __init__(self, view: ChatView, answer: SampledAnswer) -> None:
        self.num_events = 0
        self._view = view
        self._names = view.names
        self._body = body = view.body
        self._answer = answer
        self._num_prompt_tokens = len(answer.request.prompt_token_ids)
        self._head = {
            "id": chat_id(answer.request.request_id),
            "object": "chat.completion.chunk",
            "created": view.created,
            "model": answer.model,
        }
        self._readers: dict[int, ChatReader | None] = {}
        """Readers of the choices that have output."""
        self._held: dict[int, list[OutputDelta]] = {}
        """Deltas whose text is held back, such as the head of a call, by choice, where tokens are sent. They are sent
        with the next chunk that is not empty."""
        self._begun: set[int] = set()
        self._over: set[int] = set()
        self._fingerprint: str | None = None
        self._num_completion_tokens = 0
        self._is_plain = not (body.tells_usage_always or body.return_token_ids)
        self._plain: dict[int, Frame] = {}
        """Frame of plain chunks, by choice that has begun."""

    def of(self, delta: OutputDelta) -> bytes:
        """The events of one delta; a choice's first begins with its role."""
        if delta.finish_reason is None and (plain := self.plain(delta)) is not None:
            return plain
        index = delta.sequence_index
        events = b"" if index in self._over else self._choice(index, delta)
        if delta.usage is not None and self._body.tells_usage:
            events += event_of({**self._head, "choices": [], "usage": usage_of(delta.usage, self._num_thoughts())})
        return events

    def plain(self, delta: OutputDelta) -> bytes | None:
        frame = self._plain.get(delta.sequence_index)
        if frame is None or not delta.text or delta.logprobs or delta.system_fingerprint != self._fingerprint:
            return None
        if delta.sequence_index in self._held:  # they come with this text
            return None
        return b"%b%b%b" % (frame[0], json_text(delta.text).encode(errors="replace"), frame[1])

    def holds(self, choice: int) -> bool:
        return choice in self._held

    async def end(self) -> bytes:
        return DONE

    def _choice(self, index: int, delta: OutputDelta) -> bytes:
        if delta.system_fingerprint != self._fingerprint:
            self._fingerprint = delta.system_fingerprint
            self._head["system_fingerprint"] = delta.system_fingerprint or None
            self._plain.clear()
        if index not in self._readers:
            self._readers[index] = self._view.new_reader()
        deltas = self._deltas(delta)
        if not deltas and self._is_to_wait(index, delta):
            self._held.setdefault(index, []).append(delta)
            return b""
        return self._told(index, merged([*self._held.pop(index, ()), delta]), deltas)

    def _is_to_wait(self, index: int, delta: OutputDelta) -> bool:
        """Whether an empty delta has tokens that must be sent with a later one."""
        if delta.finish_reason is not None or not self._view.tells_tokens(self._readers[index]):
            return False
        return bool(delta.logprobs) or (bool(self._body.return_token_ids) and bool(delta.token_ids))

    def _told(self, index: int, output_delta: OutputDelta, deltas: list[dict[str, Any]]) -> bytes:
        """The events of a delta, with held-back events of earlier ones, whose text comes late."""
        events = b"" if index in self._begun else self._beginning(index, output_delta)
        self._num_completion_tokens += len(output_delta.token_ids)
        if not deltas and output_delta.finish_reason is None:
            return events
        *earlier, last = deltas or [{}]
        for delta in earlier:
            events += self._event(index, delta, None, None)
        tells_tokens = self._view.tells_tokens(self._readers[index])
        logprobs = chat_logprobs(output_delta.logprobs, self._names) if tells_tokens else None
        finish_reason = finish_after_calls(output_delta.finish_reason, self._readers[index])
        extra: dict[str, Any] = {}
        if self._body.return_token_ids and tells_tokens:
            extra["token_ids"] = list(output_delta.token_ids)
        if output_delta.finish_reason is not None:
            extra["stop_reason"] = output_delta.stop_reason
        events += self._event(index, last, logprobs, finish_reason, extra)
        self._note(index, output_delta)
        return events

    def _beginning(self, index: int, delta: OutputDelta) -> bytes:
        """The first chunks of a choice: its role, the requested data of the prompt, and the echo."""
        self._begun.add(index)
        of_prompt = self._view.of_prompt(self._answer.request.prompt_token_ids)
        if delta.prompt_logprobs:
            of_prompt["prompt_logprobs"] = prompt_logprobs_of(delta.prompt_logprobs, self._names.tokens)
        events = self._event(index, {"role": "assistant", "content": ""}, None, None, of_prompt=of_prompt)
        echo = _echo(self._view.body)
        return events + self._event(index, {"content": echo}, None, None) if echo else events

    def _note(self, index: int, delta: OutputDelta) -> None:
        """Notes the frame of the choice's later chunks."""
        if delta.finish_reason is not None:
            self._over.add(index)
            self._plain.pop(index, None)
        elif self._is_plain and self._readers[index] is None:
            self._plain[index] = frame_of(self._event(index, {"content": PLACE}, None, None))

    def _deltas(self, output_delta: OutputDelta) -> list[dict[str, Any]]:
        """Chunk deltas of a delta's text."""
        reader = self._readers[output_delta.sequence_index]
        if reader is None:
            return [{"content": output_delta.text}] if output_delta.text else []
        read = reader.push(output_delta.text, output_delta.token_ids)
        if output_delta.finish_reason is not None:
            read += reader.finish()
        read = self._view.read(read)
        prefix = call_prefix(output_delta.request_id, output_delta.sequence_index)
        return [delta for event in read if (delta := delta_of(prefix, event))]

    def _num_thoughts(self) -> int | None:
        return num_reasoning_tokens(self._readers.values())

    def _event(
        self,
        index: int,
        delta: Mapping[str, object],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        extra: Mapping[str, Any] | None = None,
        of_prompt: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **(extra or {})}
        chunk: dict[str, Any] = {**self._head, "choices": [choice], **(of_prompt or {})}
        if self._body.tells_usage_always:
            chunk["usage"] = usage_of(
                Usage(num_prompt_tokens=self._num_prompt_tokens, num_completion_tokens=self._num_completion_tokens),
                self._num_thoughts(),
            )
        elif self._body.tells_usage:
            chunk["usage"] = None
        return event_of(chunk)
