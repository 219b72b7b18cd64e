"""Generation request as a client sends it, as plain data, with the checks that need no model."""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Final, TypeAlias

from holdfast.router.chat import Chat
from holdfast.router.config import LimitsConfig
from holdfast.router.resume import ResumeRecord, check_record
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import FIELD
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.request import SERVICE_TEXTS, Service
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import checked_prompt, checked_seconds, checked_text


@dataclass(frozen=True, slots=True)
class ListLimit:
    """Limits of a sampling parameter with several elements, by the names of their settings in `LimitsConfig`."""

    count: str
    """Maximum number of elements."""
    length: str = ""
    """Maximum characters of an element that is text."""

    @property
    def elements(self) -> str:
        return self.count.removeprefix("max_").replace("_", " ")


LIST_LIMITS: Final[Mapping[str, ListLimit]] = {
    "stop": ListLimit("max_stop_strings", "max_stop_string_length"),
    "bad_words": ListLimit("max_bad_words", "max_bad_word_length"),
    "logit_bias": ListLimit("max_logit_bias"),
    "stop_token_ids": ListLimit("max_stop_token_ids"),
    "allowed_token_ids": ListLimit("max_allowed_token_ids"),
}
"""Limits by parameter. The static bounds of messages and of JSON bodies follow from them."""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Client's names by fields of a request. A name that ends with `.` is a prefix; any other name is a field with all
    its content. `[]` is any element of a list, and the same one in the client's name. The longest that fits counts.
    """

    names: Mapping[str, str]
    then: "FieldNames | None" = None
    """Names that these names stand for in turn, where one message is read as another one."""

    def of(self, field: str) -> str:
        """The client's name of a field, or of a part of it, such as `stop[2]`."""
        for name in sorted(self.names, key=len, reverse=True):
            if found := _pattern(name).match(field):
                own = self.names[name]
                for element in found.groups():
                    own = own.replace("[]", element, 1)
                field = own + field[found.end() :]
                break
        return field if self.then is None else self.then.of(field)

    def error(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same refusal in the client's words."""
        field, limit = self.of(error.field), error.limit
        if error.field.startswith(f"{FIELD}."):
            limit = _PARAMETER.sub(lambda found: self._other(found[0]), limit)
        if (field, limit) == (error.field, error.limit):
            return error
        return InvalidRequestError(field, error.value, limit)

    def _other(self, parameter: str) -> str:
        """Client's name of a parameter that the limit of another one mentions."""
        is_renamed = f"{FIELD}.{parameter}" in self.names or (self.then is not None and parameter in self.then.names)
        return self.of(f"{FIELD}.{parameter}") if is_renamed else parameter


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Pattern of a field, or of all fields with a prefix."""
    whole = re.escape(name).replace(r"\[\]", r"(\[\d+\])")
    return re.compile(whole if not name or name.endswith(".") else whole + r"(?=[.\[]|$)")


_PARAMETER: Final = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
"""Words of a sentence that may be a parameter's name."""

Namer: TypeAlias = Callable[[], FieldNames]

OWN_NAMES: Final = FieldNames({})
"""Names of the public proto."""


def own_names() -> FieldNames:
    return OWN_NAMES


@contextmanager
def naming(namer: Namer) -> Iterator[None]:
    """Errors about the request raised in this block use its client's names.

    No error is in a cycle, which would hold the whole body: none is in a variable, and the first has no traceback,
    since from Python 3.12 on this frame refers to the one of `__exit__`, which has that error.
    """
    try:
        yield
    except InvalidRequestError as error:
        names = namer()
        raise names.error(error.with_traceback(None)) from None


MAX_INPUTS: Final = 2048
"""Texts of one pooling request, as OpenAI has it."""

EMPTY_PROMPT: Final = "the prompt must not be empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Service):
    """A request of a client. Fields are named as in the public proto.

    Raises `InvalidRequestError` for a field of a wrong type, since callers in process construct it too.
    """

    prompt: str | tuple[int, ...] = ()
    """Text, or token ids. An empty text is valid if the tokenizer adds a token at the beginning (BOS), as in Hugging
    Face and vLLM."""
    second_text: str | None = None
    """Second of two texts, of which `prompt` is the first: an encoder's tokenizer joins them. For pooling alone."""
    chat: Chat | None = None
    """A conversation instead of a prompt; the model's chat template renders it."""
    model: str = ""
    """Empty: the only model that is served."""
    request_id: str = ""
    """Empty: the server chooses one."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    pooling: PoolingParams | None = None
    """Wish for a vector or scores of the prompt, instead of an output; None: an output. Of `sampling_params` truncation
    counts then."""
    timeout_s: float | None = None
    """None: the server's default."""
    resume: ResumeRecord | None = None
    """The output that the client already has; None: not a resumed request."""
    attempt: int = 0
    """Number of this submission of the request, from 1; 0: the client does not submit again."""
    part: int = 0
    """Which of several prompts that came under one `request_id`, as an API counts them. Clients cannot set it."""
    seed_key: str = ""
    """Text from which an unset seed is derived; empty: the request's id. Clients cannot set it."""
    names: Namer = field(default=own_names, compare=False, repr=False)
    """Client's names for the fields."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", checked_prompt(self.prompt))
        if self.second_text is not None:
            checked_text("second_text", self.second_text)
        checked_text("model", self.model)
        checked_text("request_id", self.request_id)
        if not isinstance(self.sampling_params, SamplingParams):
            raise InvalidRequestError("sampling_params", self.sampling_params, "must be SamplingParams")
        object.__setattr__(self, "sampling_params", self.sampling_params.clone())  # the caller may change its own
        if self.pooling is not None and not isinstance(self.pooling, PoolingParams):
            raise InvalidRequestError("pooling", self.pooling, "must be PoolingParams")
        self.check_service()
        if self.timeout_s is not None:
            object.__setattr__(self, "timeout_s", checked_seconds("timeout_s", self.timeout_s))

    def as_part(self, number: int, seed_key: str) -> "GenerationRequest":
        """Part `number` of several prompts under one id: parts without a seed must differ."""
        return replace(self, part=number, seed_key=seed_key)

    def with_prompt(self, prompt: str | tuple[int, ...], part: int) -> "GenerationRequest":
        """The same request for another prompt, as part `part`. Its other values were checked, and are shared."""
        twin = object.__new__(GenerationRequest)
        for name, value in zip(_FIELDS, _values(self), strict=True):
            object.__setattr__(twin, name, value)
        object.__setattr__(twin, "prompt", checked_prompt(prompt))
        object.__setattr__(twin, "part", part)
        return twin

    def check(self, limits: LimitsConfig) -> None:
        """Raises `InvalidRequestError`, naming field and limit."""
        self._check_prompt(limits)
        self._check_params(limits)
        if self.resume is not None:
            self._check_resume(self.resume)
        check_request_id(self.request_id, limits)
        for name in SERVICE_TEXTS:
            if len(getattr(self, name)) > limits.max_request_id_length:
                limit = f"must have at most {limits.max_request_id_length} characters"
                raise InvalidRequestError(name, getattr(self, name), limit)
        if self.timeout_s is not None and not 0 < self.timeout_s <= limits.max_timeout_s:
            timeout_ms = round(self.timeout_s * 1000) if math.isfinite(self.timeout_s) else self.timeout_s
            limit = f"must be above 0, and at most {limits.max_timeout_s:g} seconds (limits.max_timeout_s)"
            raise InvalidRequestError("timeout_ms", timeout_ms, limit)

    def _check_prompt(self, limits: LimitsConfig) -> None:
        if self.chat is not None:
            if self.prompt:
                raise InvalidRequestError("prompt", self.prompt, "must not be set with chat")
            self.chat.check(limits)
            return
        if isinstance(self.prompt, str):
            check_text(self.prompt, limits)
            check_text(self.second_text or "", limits)
        elif not self.prompt:
            raise InvalidRequestError("token_ids", self.prompt, EMPTY_PROMPT)
        elif len(self.prompt) > limits.max_prompt_tokens:
            limit = f"must be at most {limits.max_prompt_tokens} tokens (limits.max_prompt_tokens)"
            raise InvalidRequestError("token_ids", len(self.prompt), limit)

    def _check_resume(self, resume: ResumeRecord) -> None:
        check_record(resume, self.request_id, self.sampling_params)
        if self.chat is not None and self.chat.now_s is None:
            limit = "must be the time of the stream that was cut off: a chat template may write the date"
            raise InvalidRequestError("chat.now_s", None, limit)

    def _check_params(self, limits: LimitsConfig) -> None:
        params = self.sampling_params
        lists = [(name, getattr(params, name), limit) for name, limit in LIST_LIMITS.items()]
        for name, given, limit_of in lists:
            if given and len(given) > (most := getattr(limits, limit_of.count)):  # as a message's bounds say it, too
                limit = f"must have at most {most} elements (limits.{limit_of.count}), not {most + 1} or more"
                raise InvalidRequestError(f"{FIELD}.{name}", most + 1, limit)
        for name, given, limit_of in lists:
            if given and limit_of.length and max(map(len, given)) > (longest := getattr(limits, limit_of.length)):
                limit = f"{limit_of.elements} must have at most {longest} characters"
                raise InvalidRequestError(f"{FIELD}.{name}", given, limit)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > limits.max_logprobs:
                limit = f"must be in [0, {limits.max_logprobs}] (limits.max_logprobs)"
                raise InvalidRequestError(f"{FIELD}.{name}", getattr(params, name), limit)
        structure = params.structure
        if structure is not None and structure.num_chars > limits.max_grammar_length:
            limit = f"must have at most {limits.max_grammar_length} characters (limits.max_grammar_length)"
            raise InvalidRequestError(f"{FIELD}.structured_outputs.{structure.kind}", structure.text[:100], limit)
        if params.num_sequences > limits.max_sequences:
            name = "n" if params.best_of is None else "best_of"
            limit = f"must be at most {limits.max_sequences} (limits.max_sequences)"
            raise InvalidRequestError(f"{FIELD}.{name}", params.num_sequences, limit)

    @property
    def prompt_field(self) -> str:
        """The proto field that the prompt is in, for error messages."""
        if self.chat is not None:
            return "chat"
        return "text" if isinstance(self.prompt, str) else "token_ids"

    def check_streamable(self) -> None:
        """Raises `InvalidRequestError` for a request that cannot be streamed."""
        params = self.sampling_params
        if params.beam_width is not None:
            limit = "a beam search cannot be streamed: which beams are returned is known at the end; call Generate"
            raise InvalidRequestError("sampling_params.beam_width", params.beam_width, limit)
        if params.num_sequences > params.n:
            limit = f"more than n, {params.n}, cannot be streamed: which are chosen is known at the end; call Generate"
            raise InvalidRequestError("sampling_params.best_of", params.best_of, limit)


_FIELDS: Final = tuple(GenerationRequest.__dataclass_fields__)
_values: Final = attrgetter(*_FIELDS)


def check_text(text: str, limits: LimitsConfig, field: str = "text") -> None:
    """Raises `InvalidRequestError` for a text above `limits.max_prompt_bytes`, or with half a surrogate pair."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, text, f"must be valid Unicode: {error.reason}") from None
    if num_bytes > limits.max_prompt_bytes:
        limit = f"must be at most {limits.max_prompt_bytes} bytes (limits.max_prompt_bytes), not {num_bytes}"
        raise InvalidRequestError(field, f"{num_bytes} bytes", limit)


def truncating(num_tokens: int | None, side: str | None = None) -> SamplingParams:
    """Parameters of a pooling request: how many tokens are kept of a text. They are its first ones unless `side`, which
    is cut, is "left". Raises `InvalidRequestError`.
    """
    if side not in (None, "left", "right"):
        raise InvalidRequestError("truncation_side", side, "must be left or right")
    return SamplingParams(max_tokens=1, truncate_prompt_tokens=num_tokens, truncate_right=side != "left")


def check_inputs(field: str, inputs: Sequence[object]) -> None:
    """Raises `InvalidRequestError` for no text of a pooling request, or more than it may have."""
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise InvalidRequestError(field, len(inputs), f"must have 1 to {MAX_INPUTS} elements")


def check_request_id(request_id: str, limits: LimitsConfig) -> None:
    """Raises `InvalidRequestError` for an id that is too long, or that no header could say."""
    if len(request_id) > limits.max_request_id_length:
        limit = f"must have at most {limits.max_request_id_length} characters"
        raise InvalidRequestError("request_id", request_id, limit)
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequestError("request_id", request_id, "must consist of printable ASCII characters")


def derived_seed(request_id: str) -> int:
    """The seed of a request without one: the same on every router, in [0, 2**63).

    blake2b, because `hash` has a random salt in every process.
    """
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 1
