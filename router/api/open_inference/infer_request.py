"""Inference requests of the Open Inference Protocol: a ModelInferRequest as plain data, with tensors named as in
Triton's vLLM backend.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from holdfast.foreign import grpc_service_pb2
from holdfast.router.api.open_inference.tensors import BOOL, BYTES, FP32, UINT32, Datatype, Value, input_values
from holdfast.router.request import GenerationRequest
from holdfast.router.wire.json_bounds import JsonBounds
from holdfast.worker.errors import InvalidRequestError, UnknownModelError
from holdfast.worker.parameters import BIASES, FIELD, NUMBER, SWITCH, TEXTS, WHOLE, Kind
from holdfast.worker.request import Priority
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
    """Parameters from values by name. Null means unset. The `bounds` are those of JSON in strings. Raises
    `InvalidRequestError`, naming the parameter.
    """
    values = {}
    for name, value in given.items():
        known = _ALIASES.get(name, name)
        if known not in PARAMETERS:
            limit = f"is not a sampling parameter; known: {', '.join(PARAMETERS)}"
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


def _taken_apart(text: bytes, bounds: JsonBounds) -> tuple[bytes, dict[str, list[Any]]]:
    """Before a parser builds anything."""
    try:
        return bounds.take_apart(text, ("allowed_token_ids",))
    except InvalidRequestError as error:
        field = SAMPLING if error.field == "body" else f"{SAMPLING}.{error.field}"
        raise InvalidRequestError(field, error.value, error.limit) from None


def _typed(kind: Kind, value: Any) -> Any:
    """A value that the parameter's own check takes or refuses. An unreadable value is passed on unchanged, to be
    refused.
    """
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
    """Value of JSON text: biases, token ids, and kinds of structured outputs."""
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


VERSION: Final = "1"
"""Each model has this version alone."""

TEXT_INPUT: Final = "text_input"
TEXT_OUTPUT: Final = "text_output"
STREAM: Final = "stream"
EXCLUDE_INPUT: Final = "exclude_input_in_output"
EMPTY_FINAL: Final = "triton_enable_empty_final_response"

OUTPUTS: Final[Mapping[str, Datatype]] = MappingProxyType(
    {
        TEXT_OUTPUT: BYTES,
        "finish_reason": BYTES,
        "cumulative_logprob": FP32,
        "logprobs": BYTES,
        "num_input_tokens": UINT32,
        "num_output_tokens": UINT32,
    }
)
"""Outputs by name, in the order of an answer. All but the first come only if requested."""

INPUTS: Final[Mapping[str, Datatype]] = MappingProxyType(
    {TEXT_INPUT: BYTES, STREAM: BOOL, SAMPLING: BYTES, EXCLUDE_INPUT: BOOL}
    | {f"return_{name}": BOOL for name in OUTPUTS if name != TEXT_OUTPUT}
)
"""Inputs by name. All but the first are optional."""

_STREAM_ALIAS: Final = "streaming"
_PRIORITIES: Final[tuple[Priority, ...]] = (Priority.NORMAL, *Priority)
"""Priorities by the number in a request: 0 is the default, 1 the highest."""
_SERVICE: Final = ("tenant", "cache_salt")
_TAKEN: Final = frozenset({"priority", "timeout", EMPTY_FINAL, *_SERVICE})


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A client's request, and the form of its answer."""

    generation: GenerationRequest
    id: str
    """The client's own name of it, which comes back. Clients choose equal ones: nothing here goes by it."""
    is_streamed: bool
    outputs: tuple[str, ...]
    """The outputs to answer with, by name."""
    are_raw: bool
    """The form of the tensors."""
    has_empty_final: bool
    """A stream ends with an answer without outputs."""
    unknown_parameters: tuple[str, ...]
    """Request parameters without a meaning here."""


def infer_request(
    message: grpc_service_pb2.ModelInferRequest, bounds: JsonBounds, request_id: str = ""
) -> InferRequest:
    """The `bounds` are those of JSON. Raises `InvalidRequestError`, naming the field, and `UnknownModelError`."""
    check_version(message.model_name, message.model_version)
    inputs = input_values(message, {**INPUTS, _STREAM_ALIAS: BOOL})
    parameters = {name: _parameter(value) for name, value in message.parameters.items()}
    is_streamed = _flag(inputs, STREAM) or _flag(inputs, _STREAM_ALIAS) or False
    outputs = _outputs(message, inputs)
    service: dict[str, Any] = {name: parameters[name] for name in _SERVICE if name in parameters}
    given = {name: value for name, value in parameters.items() if is_sampling_parameter(name)}
    given |= parsed_object(_single(inputs, SAMPLING), bounds) if SAMPLING in inputs else {}
    if given.get("prompt_logprobs") is not None:
        limit = "must not be set: no output tensor reports them"
        raise InvalidRequestError(f"{SAMPLING}.prompt_logprobs", given["prompt_logprobs"], limit)
    exclude = _flag(inputs, EXCLUDE_INPUT)
    if exclude is not None or "echo" not in given:
        given["echo"] = not is_streamed if exclude is None else not exclude
    return InferRequest(
        generation=GenerationRequest(
            prompt=_text(inputs),
            model=message.model_name,
            request_id=request_id,
            sampling_params=_reporting(sampling_params(given, bounds), outputs),
            priority=_priority(parameters.get("priority", 0)),
            timeout_s=_timeout_s(parameters.get("timeout", 0)),
            **service,
        ),
        id=message.id,
        is_streamed=is_streamed,
        outputs=outputs,
        are_raw=bool(message.raw_input_contents),
        has_empty_final=parameters.get(EMPTY_FINAL) is True,
        unknown_parameters=tuple(parameters.keys() - _TAKEN - given.keys()),
    )


def check_version(model: str, version: str) -> None:
    """Raises `UnknownModelError` for a version that no model has."""
    if version not in ("", VERSION):
        raise UnknownModelError(f"{model}, version {version}", (f"version {VERSION} of each model",))


def _reporting(params: SamplingParams, outputs: Sequence[str]) -> SamplingParams:
    """Parameters with the log-probabilities that the outputs need. A beam search keeps separate sums."""
    needs = "logprobs" in outputs or ("cumulative_logprob" in outputs and params.beam_width is None)
    return params.with_changes(logprobs=0) if needs and params.logprobs is None else params


def _outputs(message: grpc_service_pb2.ModelInferRequest, inputs: Mapping[str, Sequence[Value]]) -> tuple[str, ...]:
    """Requested outputs: the named ones, or without names the text and the outputs of `return_` inputs."""
    for index, output in enumerate(message.outputs):
        if output.name not in OUTPUTS:
            raise InvalidRequestError(f"outputs[{index}].name", output.name, f"must be one of {', '.join(OUTPUTS)}")
        if output.parameters:
            limit = "must be empty: there is neither shared memory nor classification here"
            raise InvalidRequestError(f"outputs[{index}].parameters", sorted(output.parameters), limit)
    named = {output.name for output in message.outputs}
    flagged = {TEXT_OUTPUT, *(name for name in OUTPUTS if _flag(inputs, f"return_{name}"))}
    return tuple(name for name in OUTPUTS if name in (named or flagged))


def _text(inputs: Mapping[str, Sequence[Value]]) -> str:
    if TEXT_INPUT not in inputs:
        raise InvalidRequestError(TEXT_INPUT, None, "must be set")
    try:
        return bytes(_single(inputs, TEXT_INPUT)).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(TEXT_INPUT, error.object[:40], f"must be UTF-8: {error.reason}") from None


def _flag(inputs: Mapping[str, Sequence[Value]], name: str) -> bool | None:
    return bool(_single(inputs, name)) if name in inputs else None


def _single(inputs: Mapping[str, Sequence[Value]], name: str) -> Any:
    values = inputs[name]
    if len(values) != 1:
        raise InvalidRequestError(f"{name}.shape", [len(values)], "must be of one element: a request has one prompt")
    return values[0]


def _parameter(message: grpc_service_pb2.InferParameter) -> object:
    choice = message.WhichOneof("parameter_choice")
    return None if choice is None else getattr(message, choice)


def _priority(number: object) -> Priority:
    if not isinstance(number, int) or not 0 <= number < len(_PRIORITIES):
        limit = "must be 1 (the highest) to 4, or 0 for the default, which is 3"
        raise InvalidRequestError("priority", number, limit)
    return _PRIORITIES[number]


def _timeout_s(microseconds: object) -> float | None:
    if not isinstance(microseconds, int) or microseconds < 0:
        raise InvalidRequestError("timeout", microseconds, "must be microseconds, or 0 for the server's default")
    return microseconds / 1_000_000 if microseconds else None
