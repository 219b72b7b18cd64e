"""Request bodies of the OpenAI-style endpoints, as pydantic models: types, defaults, and fields that are refused.

A field that is not known is accepted, and logged once; one that is known and would be silently ignored is refused by
name if it asks for something. What may not live here: what the fields mean (`sampling.py`), limits of a server.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from holdfast.router.doors.http.errors import invalid_body
from holdfast.router.doors.loggable import loggable
from holdfast.router.wire.json_bounds import JsonBounds, TokenIds
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import PARAMETERS

logger = logging.getLogger(__name__)

_ACCEPTED = frozenset(
    [
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_options",
        "prompt_cache_retention",
        "moderation",
        "verbosity",
        "request_id",
        "include_reasoning",
        "stream_interval",
        "return_prompt_text",
    ]
)
"""Known fields that change nothing of the output."""

ONE_PLAIN_CHOICE: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "beam_width": (),
    "logprobs": (),
    "prompt_logprobs": (),
}
"""What may be said of fields for more, where an answer has no place for more."""

_logged: set[str] = set()

T = TypeVar("T")


class _First(FailFast):
    """One that unions of types take."""

    __hash__ = object.__hash__


Listed = Annotated[list[T], _First()]
"""A list, of which the first element that is wrong is told: telling all takes minutes, and gigabytes."""

Token = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """What a stream tells beside its output."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    """A last chunk without choices has the usage; the others say null."""
    continuous_usage_stats: bool = False
    """Every chunk has the usage so far."""


class ResponseFormat(BaseModel):
    """The shape of the output."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    json_schema: dict[str, Any] | None = None


class Reads(BaseModel):
    """A body that is read from JSON text, with fields that nobody declared."""

    model_config = ConfigDict(strict=True, extra="allow")

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "spaces_between_special_tokens": (True,),
        "truncation_side": ("left",),
        "logprob_token_ids": ([],),
        "kv_transfer_params": ({},),
        "vllm_xargs": ({},),
        "thinking_token_budget": (),
        "repetition_detection": (),
    }
    """Fields that are not supported, with the values that ask for nothing. None always asks for nothing."""

    def given(self, name: str) -> Any:
        """A sampling parameter as the body says it; None where it does not."""
        return (self.model_extra or {}).get(name)

    lists_of_ids: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)
    """Fields that may be long lists of token ids, which are read apart: pydantic takes ten times as long."""

    @classmethod
    def read(cls, content: bytes, bounds: JsonBounds | None = None) -> Self:
        """The body that JSON text says, within bounds. Raises `InvalidRequestError`, naming the field."""
        apart = dict[str, TokenIds]()
        if bounds is not None:
            content, apart = bounds.take_apart(content, cls.lists_of_ids)
        try:
            body = cls.model_validate_json(content)
        except ValidationError as error:
            raise invalid_body(error) from None
        for name, ids in apart.items():
            setattr(body, name, ids)
        body._check_extra()
        return body

    @classmethod
    def made(cls, fields: Mapping[str, Any]) -> Self:
        """The body of fields that another body says. Raises `InvalidRequestError`, naming the field."""
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise invalid_body(error) from None
        body._check_extra()
        return body

    def _check_extra(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in self.neutral:
                if value is not None and value not in self.neutral[name]:
                    raise InvalidRequestError(name, value, "is not supported")
            elif name not in PARAMETERS and name not in _ACCEPTED and name not in _logged and len(_logged) < 1000:
                _logged.add(name)
                logger.warning("a request has a field that is not known here, %r: it is ignored", loggable(name))


class Body(Reads):
    """What OpenAI's generating endpoints take, but for the sampling parameters: these are read by their declarations
    (`sampling.py`).
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_beam_search: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    priority: int | Literal["critical", "high", "normal", "low"] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    """The conversation, where a model is routed by session."""
    prompt_cache_key: str | None = None
    """OpenAI's word for nearly the same: requests with one key are sent to where their prompts are cached."""
    timeout: float | None = None
    """Seconds that the caller waits, as a deadline of the request."""
    return_token_ids: bool | None = None
    """Choices and chunks have the output's `token_ids`."""

    @property
    def session(self) -> str:
        """What routing by session goes by; empty: nothing."""
        return self.session_id or self.prompt_cache_key or ""

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def tells_usage(self) -> bool:
        """Whether a stream's last chunk has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tells_usage_always(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(Body):
    """`POST /v1/completions`."""

    lists_of_ids = (*Body.lists_of_ids, "prompt")
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {**Body.neutral, "suffix": ("",)}

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    add_special_tokens: bool | None = None


class ChatFields(BaseModel):
    """What a chat's prompt is made of, beside its messages: the same wherever one is sent."""

    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Listed[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The output goes on with the last message, whose turn stays open."""
    chat_template: str | None = None
    """The name of one of the model's own templates."""


class ChatBody(Body, ChatFields):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **Body.neutral,
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "add_special_tokens": (False,),
    }

    messages: Listed[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    """The answer begins with the last message's content, where that is of the answer's own role."""


class TokenizeBody(Reads, ChatFields):
    """`POST /tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Reads):
    """`POST /detokenize`."""

    lists_of_ids = (*Reads.lists_of_ids, "tokens")
    model: str | None = None
    tokens: Listed[Token]
