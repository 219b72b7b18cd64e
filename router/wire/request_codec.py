"""Protobuf codec of requests of the public API: from messages for routers, to messages for clients."""

import json
from typing import Any, Final

from holdfast.router.chat import Chat, check_messages
from holdfast.router.request import GenerationRequest
from holdfast.router.wire.chat_codec import (
    json_object,
    set_tools,
    tool_fields,
    turn,
    turn_message,
)
from holdfast.router.wire.resume_codec import in_pieces, resume_message, resume_record
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import FIELD, MAX_WHOLE
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.wire.sampling_fields import fields_of, params_of

PRIORITIES: Final = {
    Priority.CRITICAL: inference_pb2.PRIORITY_CRITICAL,
    Priority.HIGH: inference_pb2.PRIORITY_HIGH,
    Priority.NORMAL: inference_pb2.PRIORITY_NORMAL,
    Priority.LOW: inference_pb2.PRIORITY_LOW,
}
PRIORITIES_READ: Final = {int(number): priority for priority, number in PRIORITIES.items()} | {
    int(inference_pb2.PRIORITY_UNSPECIFIED): Priority.NORMAL
}

MAX_TIMEOUT_MS: Final = 2**32 - 1

TOKEN_IDS: Final = "must be token ids: integers in [0, 4294967295]"


def generation_request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    """Raises `InvalidRequestError`, naming the field."""
    priority = PRIORITIES_READ.get(message.priority)
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
        resume=resume_record(message.resume) if message.HasField("resume") else None,
        tenant=message.tenant,
        session_id=message.session_id,
        cache_ttl_s=message.cache_ttl_s,
        cache_prefix_tokens=message.cache_prefix_tokens,
        attempt=message.attempt,
    )


def generation_request_message(request: GenerationRequest) -> inference_pb2.GenerateRequest:
    """Raises `InvalidRequestError` for values that the message cannot hold."""
    message = inference_pb2.GenerateRequest(
        model=request.model,
        request_id=request.request_id,
        sampling_params=sampling_params_message(request.sampling_params),
        priority=PRIORITIES[request.priority],
        timeout_ms=timeout_in_ms(request.timeout_s),
        cache_salt=request.cache_salt,
        resume=None if request.resume is None else resume_message(request.resume),
        tenant=request.tenant,
        session_id=request.session_id,
        cache_ttl_s=request.cache_ttl_s,
        cache_prefix_tokens=request.cache_prefix_tokens,
        attempt=request.attempt,
    )
    _set_prompt(message, request)
    return message


def sampling_params_message(params: SamplingParams) -> inference_pb2.SamplingParams:
    """Raises `InvalidRequestError` for a token id that the message cannot hold."""
    fields = fields_of(params, inference_pb2.SamplingParams)
    try:
        return inference_pb2.SamplingParams(**fields)
    except ValueError:  # a number that a field cannot hold, which is rare
        return inference_pb2.SamplingParams(**{name: _held(name, value) for name, value in fields.items()})


def _held(name: str, value: Any) -> Any:
    """A parameter's value as the message can hold it: the largest number where larger ones mean the same."""
    if name in PARAMETERS and PARAMETERS[name].metadata.means_all:
        return min(value, MAX_WHOLE)
    try:
        inference_pb2.SamplingParams(**{name: value})
    except ValueError:
        raise InvalidRequestError(f"{FIELD}.{name}", value, TOKEN_IDS) from None
    return value


def timeout_in_ms(timeout_s: float | None) -> int | None:
    """Timeout in milliseconds, at least one; None means the server's default."""
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
            return tuple(in_pieces(message.token_ids.ids))
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
        raise InvalidRequestError(request.prompt_field, request.prompt, TOKEN_IDS) from None


def _chat(message: inference_pb2.Chat) -> Chat:
    return Chat(
        messages=tuple(map(turn, message.messages)),
        template_kwargs=json_object("chat.template_kwargs", message.template_kwargs),
        now_s=message.now_s if message.HasField("now_s") else None,
        continue_final_message=message.continue_final_message,
        template=message.template,
        **tool_fields(message),
    )


def _chat_message(chat: Chat) -> inference_pb2.Chat:
    check_messages(chat.messages)
    chat.check_now()
    turns = [turn_message(f"chat.messages[{index}]", item) for index, item in enumerate(chat.messages)]
    try:
        template_kwargs = json.dumps(dict(chat.template_kwargs)) if chat.template_kwargs else ""
    except (TypeError, ValueError, RecursionError) as error:
        limit = f"must be what JSON can say: {error}"
        raise InvalidRequestError("chat.template_kwargs", chat.template_kwargs, limit) from None
    message = inference_pb2.Chat(
        messages=turns,
        template_kwargs=template_kwargs,
        now_s=chat.now_s,
        continue_final_message=chat.continue_final_message,
        template=chat.template,
    )
    set_tools(message, chat)
    return message
