"""Protobuf codec of the public API: converts messages to plain data and back, for routers and for clients.

What may live here: conversion field by field, and errors for invalid fields. What may not: decisions, IO, sampling
parameters (`worker/sampling_fields.py`), errors as statuses (`statuses.py`), the link to replicas (`worker/wire/`).
"""

import json
from collections.abc import Sequence
from typing import Final

from holdfast.router.chat import Chat, check_messages
from holdfast.router.events import Usage
from holdfast.router.generation import Chunk, GeneratedSequence, Generation
from holdfast.router.request import GenerationRequest
from holdfast.router.resume import Progress, Resume
from holdfast.router.wire.chat_codec import (
    chat_delta,
    chat_delta_message,
    chat_output,
    chat_output_message,
    json_object,
    set_tools,
    tool_fields,
    turn,
    turn_message,
)
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason, Priority, TokenLogprob
from holdfast.worker.sampling_fields import fields_of, params_of
from holdfast.worker.sampling_params import SamplingParams

MAX_TIMEOUT_MS: Final = 2**32 - 1

_PRIORITIES: Final = {
    Priority.CRITICAL: inference_pb2.PRIORITY_CRITICAL,
    Priority.HIGH: inference_pb2.PRIORITY_HIGH,
    Priority.NORMAL: inference_pb2.PRIORITY_NORMAL,
    Priority.LOW: inference_pb2.PRIORITY_LOW,
}
_PRIORITIES_READ: Final = {int(number): priority for priority, number in _PRIORITIES.items()} | {
    int(inference_pb2.PRIORITY_UNSPECIFIED): Priority.NORMAL
}
_FINISH_REASONS: Final = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
_FINISH_REASONS_READ: Final = {int(number): reason for reason, number in _FINISH_REASONS.items()}


# --- requests ---


def generation_request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    """Raises `InvalidRequestError`, naming the field."""
    priority = _PRIORITIES_READ.get(message.priority)
    if priority is None:
        raise InvalidRequestError("priority", message.priority, "must be a value of holdfast.v1.Priority")
    return GenerationRequest(
        prompt=_prompt(message),
        chat=_chat(message.chat) if message.HasField("chat") else None,
        model=message.model,
        request_id=message.request_id,
        sampling_params=params_of(message.sampling_params),
        priority=priority,
        timeout_s=message.timeout_ms / 1000 if message.HasField("timeout_ms") else None,
        cache_salt=message.cache_salt,
        resume=_resume(message.resume) if message.HasField("resume") else None,
        tenant=message.tenant,
        session_id=message.session_id,
        attempt=message.attempt,
    )


def generation_request_message(request: GenerationRequest) -> inference_pb2.GenerateRequest:
    """Raises `InvalidRequestError` for values that the message cannot hold."""
    message = inference_pb2.GenerateRequest(
        model=request.model,
        request_id=request.request_id,
        sampling_params=sampling_params_message(request.sampling_params),
        priority=_PRIORITIES[request.priority],
        timeout_ms=_timeout_ms(request.timeout_s),
        cache_salt=request.cache_salt,
        resume=None if request.resume is None else _resume_message(request.resume),
        tenant=request.tenant,
        session_id=request.session_id,
        attempt=request.attempt,
    )
    _set_prompt(message, request)
    return message


def sampling_params_message(params: SamplingParams) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(**fields_of(params, inference_pb2.SamplingParams))


def _timeout_ms(timeout_s: float | None) -> int | None:
    """At least a millisecond; None means the server's default."""
    if timeout_s is None:
        return None
    if timeout_s * 1000 > MAX_TIMEOUT_MS:
        raise InvalidRequestError("timeout_s", timeout_s, f"must be at most {MAX_TIMEOUT_MS // 1000}")
    return max(1, round(timeout_s * 1000))


# --- prompts ---


def _prompt(message: inference_pb2.GenerateRequest) -> str | tuple[int, ...]:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case "chat":
            return ()
        case _:
            raise InvalidRequestError("prompt", None, "one of text, token_ids and chat must be set")


def _set_prompt(message: inference_pb2.GenerateRequest, request: GenerationRequest) -> None:
    try:
        if request.chat is not None:
            message.chat.CopyFrom(_chat_message(request.chat))
        elif isinstance(request.prompt, str):
            message.text = request.prompt
        else:
            message.token_ids.CopyFrom(inference_pb2.TokenIds(ids=request.prompt))
    except InvalidRequestError:
        raise
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            request.prompt_field, error.object, f"must be valid Unicode: {error.reason}"
        ) from None
    except (TypeError, ValueError):
        limit = "must be token ids: integers in [0, 4294967295]"
        raise InvalidRequestError(request.prompt_field, request.prompt, limit) from None


def _chat(message: inference_pb2.Chat) -> Chat:
    return Chat(
        messages=tuple(turn(f"chat.messages[{index}]", item) for index, item in enumerate(message.messages)),
        template_kwargs=json_object("chat.template_kwargs", message.template_kwargs),
        now_s=message.now_s if message.HasField("now_s") else None,
        **tool_fields(message),
    )


def _chat_message(chat: Chat) -> inference_pb2.Chat:
    check_messages(chat.messages)
    turns = [turn_message(f"chat.messages[{index}]", item) for index, item in enumerate(chat.messages)]
    try:
        template_kwargs = json.dumps(dict(chat.template_kwargs)) if chat.template_kwargs else ""
    except (TypeError, ValueError, RecursionError) as error:
        limit = f"must be what JSON can say: {error}"
        raise InvalidRequestError("chat.template_kwargs", chat.template_kwargs, limit) from None
    message = inference_pb2.Chat(messages=turns, template_kwargs=template_kwargs, now_s=chat.now_s)
    set_tools(message, chat)
    return message


# --- resumption ---


def _resume(message: inference_pb2.Resume) -> Resume:
    sequences = tuple(_progress(index, progress) for index, progress in enumerate(message.sequences))
    return Resume(sequences=sequences, fingerprint=message.system_fingerprint)


def _progress(index: int, message: inference_pb2.SequenceProgress) -> Progress:
    number = message.finish_reason
    if number not in _FINISH_REASONS_READ:
        said = "FINISH_REASON_STOP, FINISH_REASON_LENGTH or FINISH_REASON_ABORT"
        limit = f"must be unset, or what a stream's last chunk may say: {said}"
        raise InvalidRequestError(f"resume.sequences[{index}].finish_reason", number, limit)
    return Progress(
        token_ids=tuple(message.token_ids),
        text_length=message.text_length,
        finish_reason=_FINISH_REASONS_READ[number],
    )


def _resume_message(resume: Resume) -> inference_pb2.Resume:
    sequences = [
        inference_pb2.SequenceProgress(
            token_ids=progress.token_ids,
            text_length=progress.text_length,
            finish_reason=_FINISH_REASONS[progress.finish_reason],
        )
        for progress in resume.sequences
    ]
    return inference_pb2.Resume(sequences=sequences, system_fingerprint=resume.fingerprint)


# --- responses ---


def chunk(message: inference_pb2.GenerateStreamResponse) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        sequence_index=message.sequence_index,
        first_token_index=message.first_token_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=_FINISH_REASONS_READ.get(message.finish_reason),
        logprobs=_logprobs(message.logprobs) if message.logprobs else (),
        prompt_logprobs=_prompt_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        chat=chat_delta(message.chat) if message.HasField("chat") else None,
        replayed_without_guarantee=message.replayed_without_guarantee,
        system_fingerprint=message.system_fingerprint,
    )


def chunk_message(chunk: Chunk) -> inference_pb2.GenerateStreamResponse:
    return inference_pb2.GenerateStreamResponse(
        request_id=chunk.request_id,
        sequence_index=chunk.sequence_index,
        first_token_index=chunk.first_token_index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        finish_reason=_FINISH_REASONS[chunk.finish_reason],
        logprobs=map(_logprob_message, chunk.logprobs),
        prompt_logprobs=map(_logprob_message, filter(None, chunk.prompt_logprobs)),
        usage=None if chunk.usage is None else _usage_message(chunk.usage),
        chat=None if chunk.chat is None else chat_delta_message(chunk.chat),
        replayed_without_guarantee=chunk.replayed_without_guarantee,
        system_fingerprint=chunk.system_fingerprint,
    )


def generation(message: inference_pb2.GenerateResponse) -> Generation:
    return Generation(
        request_id=message.request_id,
        model=message.model,
        completions=tuple(map(_sequence, message.completions)),
        usage=_usage(message.usage),
        prompt_logprobs=_prompt_logprobs(message.completions[0].prompt_logprobs if message.completions else ()),
        replayed_without_guarantee=message.replayed_without_guarantee,
        system_fingerprint=message.system_fingerprint,
    )


def generation_message(generation: Generation) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse(
        request_id=generation.request_id,
        model=generation.model,
        completions=map(_sequence_message, generation.completions),
        usage=_usage_message(generation.usage),
        replayed_without_guarantee=generation.replayed_without_guarantee,
        system_fingerprint=generation.system_fingerprint,
    )
    if logprobs := [item for item in generation.prompt_logprobs if item is not None]:
        message.completions[0].prompt_logprobs.extend(map(_logprob_message, logprobs))
    return message


def _sequence(message: inference_pb2.Completion) -> GeneratedSequence:
    return GeneratedSequence(
        sequence_index=message.sequence_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=_FINISH_REASONS_READ.get(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        chat=chat_output(message.chat) if message.HasField("chat") else None,
    )


def _sequence_message(sequence: GeneratedSequence) -> inference_pb2.Completion:
    return inference_pb2.Completion(
        sequence_index=sequence.sequence_index,
        token_ids=sequence.token_ids,
        text=sequence.text,
        finish_reason=_FINISH_REASONS[sequence.finish_reason],
        logprobs=map(_logprob_message, sequence.logprobs),
        cumulative_logprob=sequence.cumulative_logprob,
        chat=None if sequence.chat is None else chat_output_message(sequence.chat),
    )


# --- parts of responses ---


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.prompt_tokens,
        num_completion_tokens=message.completion_tokens,
        num_cached_tokens=message.cached_prompt_tokens,
    )


def _usage_message(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        cached_prompt_tokens=usage.num_cached_tokens,
    )


def _prompt_logprobs(items: Sequence[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob | None, ...]:
    """On the wire they begin with the second token, because the first has no log-probability."""
    return (None, *_logprobs(items)) if items else ()


def _logprobs(items: Sequence[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=item.token_id,
            logprob=item.logprob,
            rank=item.rank,
            top=tuple((best.token_id, best.logprob) for best in item.top),
        )
        for item in items
    )


def _logprob_message(item: TokenLogprob) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in item.top]
    return inference_pb2.TokenLogprob(token_id=item.token_id, logprob=item.logprob, rank=item.rank, top=top)
