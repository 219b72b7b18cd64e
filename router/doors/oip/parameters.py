"""Sampling parameters as clients of the Open Inference Protocol write them: a JSON object whose values may be strings.

`"temperature": "0.1"` and `"temperature": 0.1` are the same. What may live here: bringing such values into the types
that the parameters are declared with. What may not: the parameters and their limits (`worker/sampling_params.py`).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from holdfast.router.wire.json_bounds import JsonBounds, TokenIds
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import BIASES, FIELD, NUMBER, SWITCH, TEXTS, WHOLE, Kind
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams

SAMPLING: Final = "sampling_parameters"
"""The tensor that holds them."""

_ALIASES: Final = {"guided_decoding": "structured_outputs"}
_SWITCHES: Final = {"true": True, "1": True, "false": False, "0": False}


def is_sampling_parameter(name: str) -> bool:
    return name in PARAMETERS or name in _ALIASES


def parsed_object(text: bytes, bounds: JsonBounds) -> dict[str, Any]:
    """Raises `InvalidRequestError` if it is no JSON object in UTF-8, or beyond its bounds."""
    rest, apart = _taken_apart(text, bounds)
    try:
        values = json.loads(rest.decode() or "{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidRequestError(SAMPLING, text, "must be the text of a JSON object")
    return values | apart


def sampling_params(given: Mapping[str, Any], bounds: JsonBounds) -> SamplingParams:
    """From values by name. Null is as if left out. The `bounds` are those of JSON in strings.
    Raises `InvalidRequestError`, naming the parameter.
    """
    values = {}
    for name, value in given.items():
        known = _ALIASES.get(name, name)
        if known not in PARAMETERS:
            limit = f"is no sampling parameter here; known: {', '.join(PARAMETERS)}"
            raise InvalidRequestError(SAMPLING, name, limit)
        if known in values:
            raise InvalidRequestError(SAMPLING, name, f"must not be set with {known}")
        if value is not None:
            kind = PARAMETERS[known].kind
            if isinstance(value, str) and kind not in (NUMBER, WHOLE, SWITCH, TEXTS):
                value = _from_json(known, value, bounds)
            values[known] = _typed(kind, value)
    return SamplingParams(**values)


def in_clients_words(error: InvalidRequestError) -> InvalidRequestError:
    """The same refusal, naming the field as clients of this protocol know it."""
    names = {"text": "text_input", "model": "model_name", "timeout_ms": "timeout"}
    field = names.get(error.field, error.field)
    if field == FIELD or field.startswith(f"{FIELD}."):
        field = SAMPLING + field.removeprefix(FIELD)
    return InvalidRequestError(field, error.value, error.limit) if field != error.field else error


def _taken_apart(text: bytes, bounds: JsonBounds) -> tuple[bytes, dict[str, TokenIds]]:
    """Before a parser builds anything."""
    try:
        return bounds.take_apart(text, ("allowed_token_ids",))
    except InvalidRequestError as error:
        field = SAMPLING if error.field == "body" else f"{SAMPLING}.{error.field}"
        raise InvalidRequestError(field, error.value, error.limit) from None


def _typed(kind: Kind, value: Any) -> Any:
    """A value that the parameter's own check takes or refuses. What is unreadable stays as it is, to be refused."""
    if kind is BIASES:
        return _biases(value)
    if not isinstance(value, str):
        return value
    if kind is SWITCH:
        return _SWITCHES.get(value.strip().lower(), value)
    return _number(kind, value) if kind in (NUMBER, WHOLE) else value


def _number(kind: Kind, text: str) -> Any:
    try:
        return float(text) if kind is NUMBER else int(text)
    except ValueError:
        return text


def _from_json(name: str, value: str, bounds: JsonBounds) -> Any:
    """Of biases, token ids, and the kinds of structured outputs."""
    _, apart = _taken_apart(b'{"%b":%b}' % (name.encode(), value.encode(errors="replace")), bounds)
    if name in apart:
        return apart[name]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _biases(value: Any) -> Any:
    """Keys of JSON objects are strings, and token ids are numbers."""
    if not isinstance(value, Mapping):
        return value
    biases = {key: _number(NUMBER, bias) if isinstance(bias, str) else bias for key, bias in value.items()}
    return {_number(WHOLE, key): bias for key, bias in biases.items()}
