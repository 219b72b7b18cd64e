"""Request bodies of the OpenAI-style endpoints, as pydantic models: types, defaults, and fields that are refused."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from holdfast.router.api.http.json_body import Listed, Reads
from holdfast.router.api.http.stored_objects import check_metadata
from holdfast.router.request import FieldNames
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import FIELD
from holdfast.worker.sampling_params import PARAMETERS
from holdfast.worker.value_types import Neutral

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


class Notes(BaseModel):
    """Fields about the user and the price, which no answer depends on. Only their values are checked."""

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

    @property
    def shape_field(self) -> str:
        """Field of the output's structure."""
        old = (own for own in self.renamed if own.startswith("guided_") and self._says(own))
        return self.shape_field_or(next(old, "response_format"))

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
    """False: a prompt's text already has the special tokens that the model expects around it."""


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
    """The output continues the last message, whose turn stays open."""
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
