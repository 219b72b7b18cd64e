"""Parameter declarations: a field's annotation holds its type, range, help text and scope;
its check follows from it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from numbers import Integral, Real
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from holdfast.worker.errors import InvalidRequestError, shortened
from holdfast.worker.structured_outputs import StructuredOutputs

MAX_SEED: Final = 2**63 - 1
"""Requests are drawn with seeds from 0 to this."""

GREEDY_TEMPERATURE: Final = 1e-5
"""Below this temperature a draw is an argmax."""

MAX_LOGPROBS: Final = 1024
"""Alternatives that can be asked for at each token."""

ALL_LOGPROBS: Final = -1
"""Asks for the whole vocabulary, where that is not more than may be asked for."""

MAX_LOGPROB_TOKEN_IDS: Final = 128
"""Tokens that can be asked for by their ids at each token."""

MAX_BEAM_WIDTH: Final = 10
"""A beam search considers twice as many candidates as it has beams."""

FIELD: Final = "sampling_params"
"""Field of requests that holds the parameters: refusals name a parameter with this prefix."""


class Scope(StrEnum):
    """Parts of the system that a parameter concerns."""

    TOKENS = "tokens"
    """The link to replicas carries it."""
    TEXT = "text"
    """The router alone uses it."""


class Group(StrEnum):
    """Under which heading the command line shows a parameter."""

    SAMPLING = "sampling"
    STRUCTURE = "structured output"
    ENDING = "end of the output"
    REPORT = "several completions, and reported data"


@dataclass(frozen=True)
class Kind:
    """The type of a parameter's value as callers give it: numpy's numbers count as numbers, a bool does not."""

    stored_as: Any
    """The type that pydantic makes of it, by its strict rules."""
    prepare: Callable[[object], object]
    """Converts acceptable values to the form of those rules; others are left or refused."""
    wish: str
    """Error text for a value of another type."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Facts of a declaration besides type, range and description (pydantic's `Field`)."""

    scope: Scope
    group: Group
    limit: str = ""
    """Error text for a value outside its limits, where the range alone is not enough."""
    limits: str = ""
    """The same in a table of parameters."""
    neutral: str = ""
    """The default in a table of parameters, where the value alone does not say it."""
    with_beams: bool = True
    """Whether it may be set for a beam search."""
    means_all: bool = False
    """Whether a value larger than the number of tokens means all of them."""
    draw_type: str = ""
    """Type in a draw's record (`worker/draws.py`), a letter of `struct`; empty: not in it."""
    is_penalty: bool = False
    """A float32 in the record of a row's penalties."""
    flag_default: object = ...
    """Default of the command line where it differs; `...`: it does not."""
    short_flag: str = ""
    negative_flag: str = ""
    """Turns it off."""


def _number(value: object) -> object:
    if type(value) is not float and not isinstance(value, Real):
        raise _wrong_type()  # such as a Decimal, which pydantic would take
    return value


def _whole(value: object) -> object:
    if type(value) is int or isinstance(value, bool) or not isinstance(value, Integral):
        return value
    return int(value)


def _same(value: object) -> object:
    return value


def _texts(value: object) -> object:
    return (value,) if isinstance(value, str) else _listed(value)


def _token_ids(value: object) -> object:
    listed = _listed(value)
    if not isinstance(listed, tuple) or set(map(type, listed)) <= {int}:
        return listed  # the quick way, for there can be many
    return tuple(map(_whole, listed))


def _listed(value: object) -> object:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping) else value


def _biases(value: object) -> object:
    if isinstance(value, Mapping):
        numbers = ((token_id, bias if isinstance(bias, Real) else None) for token_id, bias in value.items())
        # a value that is not a number is refused by its token
        return {_whole(token_id): bias for token_id, bias in numbers}
    return {} if value is None else value


def by_token_id(biases: object) -> object:
    """Biases whose token ids may be texts, as those of JSON. Raises `InvalidRequestError`, naming the wrong ones."""
    if not isinstance(biases, Mapping):
        return biases
    if wrong := [key for key in biases if not _is_token_id(key)]:
        named = ", ".join(shortened(key) for key in wrong[:_MAX_NAMED]) + ", ..." * (len(wrong) > _MAX_NAMED)
        raise InvalidRequestError(f"{FIELD}.logit_bias", wrong[0], f"must have token ids as its keys, not {named}")
    return {int(key): bias for key, bias in biases.items()}


def _is_token_id(key: Any) -> bool:
    try:
        int(key)
    except (TypeError, ValueError):
        return False
    return True


def _structure(value: object) -> object:
    if not isinstance(value, StructuredOutputs | Mapping):
        raise _wrong_type()
    return StructuredOutputs.of(value)


def _without_blanks(words: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(str.strip, words)):
        raise ValueError("blank")
    return words


def _without_zero(number: int) -> int:
    if number == 0:
        raise ValueError("zero")
    return number


def _at_least_zero(number: int) -> int:
    return max(number, 0)


NOT_BLANK: Final = AfterValidator(_without_blanks)
NOT_ZERO: Final = AfterValidator(_without_zero)
AT_LEAST_ZERO: Final = AfterValidator(_at_least_zero)
"""Takes negative numbers as zero."""


def _wrong_type() -> PydanticCustomError:
    return PydanticCustomError("wrong_type", "is of a wrong type")


_MAX_NAMED: Final = 8
"""Wrong keys that an error names."""

MAX_LOGIT_BIAS: Final = 100.0
"""A bias of this size bans a token or forces it, as far as logits go."""

MAX_WHOLE: Final = 2**31 - 1
"""The largest integer of a parameter without a bound: the largest that every protocol can carry. Token ids are checked
later.
"""

_TokenId = Annotated[int, Field(ge=0)]
_Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]

NUMBER: Final = Kind(float, _number, "must be a number")
WHOLE: Final = Kind(int, _whole, "must be a whole number")
SWITCH: Final = Kind(bool, _same, "must be True or False")
TEXTS: Final = Kind(tuple[Annotated[str, Field(min_length=1)], ...], _texts, "must be text, or a list of texts")
TOKEN_IDS: Final = Kind(tuple[_TokenId, ...], _token_ids, "must be a list of token ids")
BIASES: Final = Kind(dict[_TokenId, _Bias], _biases, "must give token ids numbers")
STRUCTURE: Final = Kind(Any, _structure, "must be StructuredOutputs, or a mapping of its fields")

_PLAIN_KINDS: Final = {float: NUMBER, int: WHOLE, bool: SWITCH}


@dataclass(frozen=True)
class Parameter:
    """One declared field."""

    name: str
    default: Any
    """`MISSING` if each owner gets a new empty one."""
    kind: Kind
    is_optional: bool
    """None is a value."""
    field: FieldInfo
    metadata: Metadata

    def check(self, value: object) -> Any:
        """The value as it is stored. Raises `InvalidRequestError`, naming the parameter."""
        if value is None and self.is_optional:
            return None
        try:
            return self._validate(value)
        except ValidationError as error:
            raise self._refusal(value, error) from None

    def allows(self, value: object) -> bool:
        """Whether it is a value of the parameter by itself."""
        try:
            self.check(value)
        except InvalidRequestError:
            return False
        return True

    @cached_property
    def _validate(self) -> Callable[[object], Any]:
        constraints = [item for item in self.field.metadata if not isinstance(item, Kind | Metadata)]
        if self._is_unbounded:
            constraints.append(Field(le=MAX_WHOLE))
        annotated: Any = Annotated
        checked = annotated[(self.kind.stored_as, *constraints, BeforeValidator(self.kind.prepare))]
        return TypeAdapter(checked, config=ConfigDict(strict=True)).validator.validate_python

    def _refusal(self, value: object, error: ValidationError) -> InvalidRequestError:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InvalidRequestError):
            return cause
        limit = self.kind.wish if first["type"].endswith("_type") else self.limit
        if self._is_unbounded and first["type"] == "less_than_equal":
            limit = f"must be at most {MAX_WHOLE}"
        if self.kind is BIASES and first["loc"]:
            limit = f"{limit}; that of token {shortened(first['loc'][0])} is wrong"
        return InvalidRequestError(f"{FIELD}.{self.name}", value, limit)

    @property
    def _is_unbounded(self) -> bool:
        return self.kind is WHOLE and self._bound("le") is None and not self.metadata.means_all

    @property
    def help(self) -> str:
        return self.field.description or ""

    @property
    def limit(self) -> str:
        """Allowed values, in words that follow the value."""
        low, high = self._bound("ge", "gt"), self._bound("le")
        if self.metadata.limit or low is None:
            return self.metadata.limit or self.kind.wish
        if high is None:
            return f"must be at least {_figure(low)}" if low else "must not be negative"
        bracket = "(" if self._bound("gt") is not None else "["
        return f"must be in {bracket}{_figure(low)}, {_figure(high)}]"

    @property
    def limits(self) -> str:
        """The range in words for a table; empty if there is none."""
        low, high = self._bound("ge", "gt"), self._bound("le")
        if self.metadata.limits or low is None:
            return self.metadata.limits
        if high is None:
            return f"{_figure(low)} or more"
        return (
            f"above {_figure(low)}, to {_figure(high)}"
            if self._bound("gt") is not None
            else f"{_figure(low)} to {_figure(high)}"
        )

    def _bound(self, *sides: str) -> Any:
        bounds = (getattr(item, side, None) for item in self.field.metadata for side in sides)
        return next((bound for bound in bounds if bound is not None), None)


def _figure(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


class Declarations(dict[str, Parameter]):
    """The parameters that a dataclass declares, by name."""

    def __init__(self, cls: type) -> None:
        hints = get_type_hints(cls, include_extras=True)
        super().__init__({item.name: _parameter(item.name, item.default, hints[item.name]) for item in fields(cls)})
        self.values_of: Callable[[object], tuple[Any, ...]] = attrgetter(*self)
        """All values of an object of that class, in order. Quicker than one after the other."""

    def drawn_by(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Parameters of drawing in the settings of a checkpoint (generation_config.json)."""
        names = [name for name, parameter in self.items() if parameter.metadata.group is Group.SAMPLING]
        return {name: settings[name] for name in names if settings.get(name) is not None}


def _parameter(name: str, default: object, hint: Any) -> Parameter:
    base, *metadata = get_args(hint)
    kinds = [item for item in metadata if isinstance(item, Kind)]
    kinds += [_PLAIN_KINDS[item] for item in (base, *get_args(base)) if item in _PLAIN_KINDS]
    (about,) = (item for item in metadata if isinstance(item, Metadata))
    return Parameter(name, default, kinds[0], NoneType in get_args(base), FieldInfo.from_annotation(hint), about)
