"""Request bodies of the OpenAI-style endpoints, as pydantic models: types, defaults, and fields that are refused.

A field of a body that is not known is accepted, and logged once; one that is known and would be silently ignored is
refused by name if it asks for something, and so is a field that is not known in an object.
"""

import logging
from collections.abc import Collection, Container, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, PrivateAttr, ValidationError

from holdfast.router.api.http.errors import invalid_body
from holdfast.router.api.http.stored_objects import check_metadata
from holdfast.router.api.intake import loggable
from holdfast.router.request import FieldNames, naming
from holdfast.router.wire.bounds import INLINE_BYTES
from holdfast.router.wire.json_bounds import JsonBounds
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import FIELD
from holdfast.worker.process_memory import uncollected
from holdfast.worker.sampling_params import PARAMETERS
from holdfast.worker.value_types import SAMPLING_FIELDS, Neutral, check_names, check_neutral

logger = logging.getLogger(__name__)

ONE_PLAIN_CHOICE: Final[Neutral] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "beam_width": (),
    "logprobs": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "echo": (False,),
}
"""Values of the fields for several choices that are accepted where an answer has one choice."""

_logged: set[str] = set()

T = TypeVar("T")


class _First(FailFast):
    """One that unions of types take."""

    __hash__ = object.__hash__


Listed = Annotated[list[T], _First()]
"""A list whose first invalid element is reported: reporting all takes minutes, and gigabytes."""

Token = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """Options of a stream beside its output."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    """A last chunk without choices has the usage; the others say null."""
    continuous_usage_stats: bool = False
    """Adds the usage so far to every chunk, with `include_usage`."""


class ResponseFormat(BaseModel):
    """The shape of the output."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None


class Reads(BaseModel):
    """A body that is read from JSON text; undeclared fields are kept."""

    model_config = ConfigDict(strict=True, extra="allow")

    _origin: "Reads | None" = PrivateAttr(default=None)
    """The body that this one is made of."""

    neutral: ClassVar[Neutral] = {
        **SAMPLING_FIELDS,
        "include_reasoning": (True,),
        "return_prompt_text": (False,),
        "return_token_strs": (False,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "return_token_offsets": (False,),
        "return_weight_versions": (False,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
        "prompt_embeds": ([],),
        "vllm_xargs": ({},),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "mm_payload": ("tensors", "none"),
        "return_mm_kwargs": (False, True),  # no prompt here has media, of which these tell
        "moderation": (),
        "stream_options.include_obfuscation": (False,),
    }
    """Fields that are not supported, with the values that ask for nothing. None always asks for nothing. A name with a
    dot is that of a field in an object.
    """

    objects: ClassVar[Mapping[str, Collection[str]]] = {
        "stream_options": ("include_usage", "continuous_usage_stats"),
        "response_format": ("type", "json_schema"),
        "response_format.json_schema": ("name", "description", "strict", "schema"),
        "prompt_cache_options": ("mode", "ttl", "prewarm", "comparison_response_id"),
    }
    """Names of fields in objects, by the object's path: with those of `neutral` all that are known."""

    passed_on: ClassVar[Container[str]] = ()
    """Fields that are not declared, and are read by the body that is made of this one."""

    def given(self, name: str) -> Any:
        """A sampling parameter as the body says it; None where it does not."""
        return (self.model_extra or {}).get(name)

    renamed: ClassVar[Mapping[str, str]] = {}
    """The request's field by the body's field, where names differ: for reading, and for names in errors."""

    fixed_names: ClassVar[Mapping[str, str]] = {}
    """Names in errors by fields of the request, where they do not depend on the body."""

    def given_renamed(self) -> dict[str, Any]:
        """Values of renamed fields, by the request's name; without those of dotted names."""
        given = ((other, getattr(self, own, None)) for own, other in self.renamed.items() if "." not in own + other)
        return {other: value for other, value in given if value is not None}

    def names(self) -> FieldNames:
        """The body's names for the fields of the request made from it."""
        said = {other: own for own, other in self.renamed.items() if self._says(own)}
        return FieldNames({**self.fixed_names, **said})

    def _says(self, own: str) -> bool:
        value = getattr(self, own.partition(".")[0], None)
        return value is not None

    lists_of_ids: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)
    """Fields that may be long lists of token ids, which are read apart: pydantic takes ten times as long."""

    lists_of_objects: ClassVar[tuple[str, ...]] = ()
    """Fields that may be long lists of objects, which are read apart: a parser holds Python's lock to its end."""

    @classmethod
    def read(cls, content: bytes, bounds: JsonBounds | None = None) -> Self:
        """The body that JSON text says, within bounds. Raises `InvalidRequestError`, naming the field."""
        apart = dict[str, list[Any]]()
        if bounds is not None:
            content, apart = bounds.take_apart(content, cls.lists_of_ids, cls.lists_of_objects)
        try:
            with uncollected() if len(content) > INLINE_BYTES else nullcontext():
                body = cls.model_validate_json(content)
        except ValidationError as error:
            raise invalid_body(error) from None
        for name, elements in apart.items():
            setattr(body, name, elements)
        body._check_extra()
        body._check_together()
        return body

    @classmethod
    def made(cls, fields: Mapping[str, Any]) -> Self:
        """The body of fields that another body says. Raises `InvalidRequestError`, naming the field."""
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise invalid_body(error) from None
        body._check_extra()
        body._check_together()
        return body

    @classmethod
    def made_of(cls, origin: "Reads", fields: Mapping[str, Any]) -> Self:
        """Like `made`, for a body that reports errors by its own field names."""
        with naming(origin.names):
            body = cls.made(fields)
        body._origin = origin
        return body

    def _check_together(self) -> None:
        """Raises `InvalidRequestError` for a field that means nothing beside the others."""

    def _check_extra(self) -> None:
        for own in self.model_fields_set:
            if own in self.objects:
                self._check_inside(own)
        for name, value in (self.model_extra or {}).items():
            if name in self.neutral:
                if value is not None:
                    check_neutral(name, value, self.neutral[name])
            elif not self.knows(name) and name not in _logged and len(_logged) < 1000:
                _logged.add(name)
                logger.warning("a request has a field that is not known here, %r: it is ignored", loggable(name))

    def _check_inside(self, own: str) -> None:
        """Raises `InvalidRequestError` for a field in an object that is not known, or asks for what is not here."""
        for path, known in self.objects.items():
            if path == own or path.startswith(f"{own}."):
                fields, wishes = self._object(path), self._wishes(path)
                for name in wishes.keys() & fields.keys():
                    if fields[name] is not None:
                        check_neutral(f"{path}.{name}", fields[name], wishes[name])
                check_names(fields, known, path, wishes)

    @classmethod
    @cache
    def _wishes(cls, path: str) -> Neutral:
        """The part of `neutral` that is of an object's fields, by their names in it."""
        places = ((name.rpartition("."), values) for name, values in cls.neutral.items())
        return {name: values for (own, _, name), values in places if own == path}

    def _object(self, path: str) -> Mapping[str, Any]:
        """The fields of an object; none where there is none. Those that a model declares are known."""
        own, _, inner = path.partition(".")
        value = getattr(self, own)
        if inner:
            value = getattr(value, inner) if isinstance(value, BaseModel) else (value or {}).get(inner)
        elif isinstance(value, BaseModel):
            value = value.model_extra
        return value if isinstance(value, Mapping) else {}

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether a field is read, or refused unless it asks for nothing."""
        declared = name in cls.model_fields or name in cls.neutral or name in PARAMETERS
        return declared or name in cls.passed_on


class Notes(BaseModel):
    """Fields that no answer depends on: who asks, and what it costs. Their values are checked, and that is all."""

    user: str | None = None
    safety_identifier: str | None = None
    service_tier: (
        Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast", "standard_only"] | None
    ) = None
    prompt_cache_options: dict[str, Any] | None = None


class Body(Reads, Notes):
    """Fields of OpenAI's generating endpoints without the sampling parameters, which are read by their declarations
    (`sampling.py`).
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "guided_json": "structured_outputs.json",
        "guided_regex": "structured_outputs.regex",
        "guided_choice": "structured_outputs.choice",
        "guided_grammar": "structured_outputs.grammar",
        "response_format": "structured_outputs",
        "response_format.json_schema.schema": "structured_outputs.json",
        "prompt_cache_key": "session_id",
    }
    fixed_names: ClassVar[Mapping[str, str]] = {
        f"{FIELD}.": "",
        "chat.": "",
        "chat": "messages",
        "chat.template_kwargs": "chat_template_kwargs",
        **dict.fromkeys(("text", "token_ids"), "prompt"),
        **dict.fromkeys(("timeout_ms", "timeout_s"), "timeout"),
    }

    def names(self) -> FieldNames:
        said = {_field_of(other): own for own, other in self.renamed.items() if self._says(own)}
        if self.use_beam_search:
            said[f"{FIELD}.beam_width"] = "n" if self.given("n") is not None else "use_beam_search"
        then = None if self._origin is None else self._origin.names()
        return FieldNames({**self.fixed_names, **said}, then)

    model: str | None = None
    request_id: str | None = None
    """The answer's `id` is made of it, and the tenant can abort the request by it. Unset: one is chosen."""
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
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    cache_ttl_s: int | None = None
    cache_prefix_tokens: int | None = None
    timeout: float | None = None
    """Seconds that the caller waits, as a deadline of the request."""
    truncation_side: Literal["left", "right"] | None = None
    """End of the prompt that `truncate_prompt_tokens` cuts."""
    return_token_ids: bool | None = None
    """Choices and chunks have the output's `token_ids`, and the prompt's where they begin."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities write tokens as `token_id:7`."""

    def _check_together(self) -> None:
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise InvalidRequestError("stream_options", "set", "must come with stream = true")

    @property
    def session(self) -> str:
        """Session for routing; empty: none."""
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
        return self.tells_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


def _field_of(parameter: str) -> str:
    """Name in the request of a parameter that a body renames."""
    return f"{FIELD}.{parameter}" if parameter.partition(".")[0] in PARAMETERS else parameter


class CompletionBody(Body):
    """`POST /v1/completions`."""

    lists_of_ids = (*Body.lists_of_ids, "prompt")
    neutral: ClassVar[Neutral] = {**Body.neutral, "suffix": ("",)}

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    add_special_tokens: bool | None = None
    """False: a prompt's text has those that the model expects around it already."""


class ChatFields(BaseModel):
    """Fields that a chat's prompt depends on, beside its messages: the same in every API."""

    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Templates that know other values get them in `chat_template_kwargs`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Listed[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The output goes on with the last message, whose turn stays open."""
    chat_template: str | None = None
    """The name of one of the model's own templates."""


class ChatBody(Body, ChatFields):
    """`POST /v1/chat/completions`."""

    renamed: ClassVar[Mapping[str, str]] = {
        **Body.renamed,
        "max_completion_tokens": "max_tokens",
        "top_logprobs": "logprobs",
    }
    neutral: ClassVar[Neutral] = {
        **Body.neutral,
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "add_special_tokens": (False,),
    }

    lists_of_objects = ("messages", "tools", "documents")
    messages: Listed[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    """The answer begins with the last message's content, where that is of the answer's own role."""
    store: bool | None = None
    """The answer is kept, with the messages, where answers are stored."""
    metadata: dict[str, Any] | None = None
    """Metadata of a stored answer, by which it can be found."""
    include_reasoning: bool | None = None
    """False: reasoning is not sent, nor are tokens from which it could be read."""
    return_prompt_text: bool | None = None
    """The answer has the prompt that the template made, as `prompt_text`."""

    def _check_together(self) -> None:
        super()._check_together()
        check_metadata(self.metadata)

    @property
    def hides_reasoning(self) -> bool:
        return self.include_reasoning is False


class TokenizeBody(Reads, ChatFields):
    """`POST /tokenize`: a prompt or a chat."""

    fixed_names: ClassVar[Mapping[str, str]] = Body.fixed_names

    lists_of_objects = ChatBody.lists_of_objects
    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Unset: to a prompt, but not to a chat, whose template has written them."""
    return_token_strs: bool | None = None
    """The answer has the tokens as the vocabulary writes them."""


class DetokenizeBody(Reads):
    """`POST /detokenize`."""

    fixed_names: ClassVar[Mapping[str, str]] = {"token_ids": "tokens"}

    lists_of_ids = (*Reads.lists_of_ids, "tokens")
    model: str | None = None
    tokens: Listed[Token]
