"""Mapping between sampling parameters and protobuf messages, both ways: a parameter is the field of the same name.

No parameter is named here. Where a message also has a field `no_X`, setting it means None for parameter X, and leaving
X unset means the default.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import BIASES, FIELD, STRUCTURE, Kind, Parameter, Scope
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

ALL_SCOPES: Final = frozenset(Scope)
TOKEN_SCOPE: Final = frozenset({Scope.TOKENS})


def fields_of(params: SamplingParams, message: type[Message], scopes: frozenset[Scope] = ALL_SCOPES) -> dict[str, Any]:
    """Fields of a message of this type that say the parameters of these scopes. A default may be left unset."""
    fields: dict[str, Any] = {}
    for field in _form(message.DESCRIPTOR, scopes).fields.values():
        value = getattr(params, field.name)
        if value is None:
            fields |= {field.denial: True} if field.denial else {}
        elif not field.can_be_unset or value != field.default:
            fields[field.name] = _structure_fields(value) if field.kind is STRUCTURE else value
    return fields


def params_of(message: Message, scopes: frozenset[Scope] = ALL_SCOPES) -> SamplingParams:
    """Parameters of these scopes in a message. Only fields that are set override a default: zero means something.

    Raises `InvalidRequestError`, naming the field.
    """
    form = _form(message.DESCRIPTOR, scopes)
    given = dict(form.unsaid)
    said = {field.name: value for field, value in message.ListFields()}  # a call for each parameter takes longer
    for name, value in said.items():
        if (field := form.fields.get(name)) is not None:
            given[name] = _value(field, value)
        elif (denied := form.denied.get(name)) is not None:
            if denied in said:
                raise InvalidRequestError(f"{FIELD}.{denied}", said[denied], f"must not be set with {name}")
            given[denied] = None
    return form.unset.with_changes(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Field:
    """Encoding of a parameter in a type of message."""

    name: str
    kind: Kind
    default: object
    denial: str
    """The field that says None instead, if there is one."""
    is_repeated: bool
    """Whether it is repeated: if it is empty, the default holds."""
    can_be_unset: bool
    zero_is_none: bool
    """Whether zero stands for unset, because it cannot be unset and zero is no value of the parameter."""
    is_short: bool
    """Whether its numbers, or the ones that it maps to, have 32 bits."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Encoding of all parameters of some scopes in a type of message."""

    fields: Mapping[str, _Field]
    denied: Mapping[str, str]
    """Parameter by the field that says None."""
    unset: SamplingParams
    """The defaults: a copy with changes costs less than the constructor."""
    unsaid: Mapping[str, object]
    """Values of parameters whose fields have no presence, when left out and not the default: their zero."""


@cache
def _form(message: Any, scopes: frozenset[Scope]) -> _Form:
    chosen = [parameter for parameter in PARAMETERS.values() if parameter.metadata.scope in scopes]
    fields = {parameter.name: _field(message, parameter) for parameter in chosen}
    zeros = {
        name: _value(field, message.fields_by_name[name].default_value)
        for name, field in fields.items()
        if not (field.can_be_unset or field.is_repeated)
    }
    return _Form(
        fields,
        {field.denial: name for name, field in fields.items() if field.denial},
        SamplingParams(),
        {name: zero for name, zero in zeros.items() if zero != fields[name].default},
    )


def _field(message: Any, parameter: Parameter) -> _Field:
    field = message.fields_by_name[parameter.name]
    numbers = field.message_type.fields_by_name["value"] if parameter.kind is BIASES else field
    is_plain = not field.has_presence and not field.is_repeated
    return _Field(
        name=parameter.name,
        kind=parameter.kind,
        default=parameter.default,
        denial=f"no_{parameter.name}" if f"no_{parameter.name}" in message.fields_by_name else "",
        is_repeated=field.is_repeated,
        can_be_unset=field.has_presence,
        zero_is_none=is_plain and parameter.is_optional and not parameter.allows(field.default_value),
        is_short=numbers.type == FieldDescriptor.TYPE_FLOAT,
    )


def _value(field: _Field, value: Any) -> object:
    if field.zero_is_none and not value:
        return None
    if field.kind is STRUCTURE:
        return _structure(value)
    if field.kind is BIASES:
        return {key: shortest_decimal(bias) for key, bias in value.items()} if field.is_short else dict(value)
    if field.is_repeated:
        return tuple(value)
    return shortest_decimal(value) if field.is_short else value


def shortest_decimal(value: float) -> float:
    """The double that a 32-bit float was most likely written as: 0.7 rather than 0.699999988.

    So a request draws the same tokens over the wire as in process, where parameters are doubles.
    """
    if -1e5 < value < 1e5 and value.is_integer():
        return value
    for num_digits in (6, 7, 8):
        short = float(f"{value:.{num_digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value


# --- structured outputs: one of several kinds, of which a choice is a message ---


def _structure_fields(structure: StructuredOutputs) -> dict[str, object]:
    value = getattr(structure, structure.kind)
    return {structure.kind: value if structure.choice is None else {"texts": value}}


def _structure(message: Any) -> dict[str, object]:
    kind = message.WhichOneof("kind")
    if kind is None:
        return {}
    return {kind: tuple(message.choice.texts) if kind == "choice" else getattr(message, kind)}
