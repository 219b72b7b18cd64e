"""Protobuf codec of pooling requests of the public API: from messages for routers, to messages for clients."""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.router.request import FieldNames, GenerationRequest, check_inputs, truncating
from holdfast.router.wire.request_codec import PRIORITIES, PRIORITIES_READ, TOKEN_IDS, timeout_in_ms
from holdfast.router.wire.resume_codec import in_pieces
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import FIELD
from holdfast.worker.pooling import PoolingParams

_NAMES: Final = FieldNames(
    {
        f"{FIELD}.": "options.",
        **{name: f"options.{name}" for name in ("priority", "timeout_ms", "cache_salt", "tenant", "use_activation")},
        **dict.fromkeys(("text", "token_ids"), "inputs"),
    }
)
_OF_PAIRS: Final = FieldNames({"inputs": "documents"}, _NAMES)


class PooledOutput(NamedTuple):
    """Result of one input, as clients get it."""

    values: tuple[float, ...]
    """A vector, or scores by label; float32."""
    num_prompt_tokens: int
    num_cached_tokens: int


class PooledOutputs(NamedTuple):
    """Results of one call."""

    model: str
    outputs: tuple[PooledOutput, ...]
    """In the order of the inputs."""
    labels: tuple[str, ...]
    """Names of the scores; empty: the values are vectors."""


def pool_names() -> FieldNames:
    """Names of a `PoolRequest`'s fields."""
    return _NAMES


def score_names() -> FieldNames:
    """Names of a `ScoreRequest`'s fields."""
    return _OF_PAIRS


def pool_request(message: inference_pb2.PoolRequest) -> tuple[GenerationRequest, list[str | tuple[int, ...]]]:
    """A request without a prompt, and the prompts. Raises `InvalidRequestError`, naming the field."""
    check_inputs("inputs", message.inputs)
    prompts = [_input(number, one) for number, one in enumerate(message.inputs)]
    dimensions = message.dimensions if message.HasField("dimensions") else None
    return _bare(message.model, message.request_id, message.options, dimensions, is_pairs=False), prompts


def score_request(message: inference_pb2.ScoreRequest) -> GenerationRequest:
    """A request without a prompt; the texts stay in the message. Raises `InvalidRequestError`, naming the field."""
    for name in ("queries", "documents"):
        check_inputs(name, getattr(message, name))
    return _bare(message.model, message.request_id, message.options, None, is_pairs=True)


def pool_message(prompts: Sequence[str | Sequence[int]], bare: GenerationRequest) -> inference_pb2.PoolRequest:
    """Raises `InvalidRequestError` for values that the message cannot hold."""
    check_inputs("inputs", prompts)
    pooling = bare.pooling or PoolingParams()
    return inference_pb2.PoolRequest(
        model=bare.model,
        request_id=bare.request_id,
        inputs=[_input_message(number, one) for number, one in enumerate(prompts)],
        dimensions=pooling.dimensions,
        options=_options(bare),
    )


def score_message(
    queries: Sequence[str], documents: Sequence[str], instruction: str, bare: GenerationRequest
) -> inference_pb2.ScoreRequest:
    """Raises `InvalidRequestError` for values that the message cannot hold."""
    for name, texts in (("queries", queries), ("documents", documents)):
        check_inputs(name, texts)
    try:
        return inference_pb2.ScoreRequest(
            model=bare.model,
            request_id=bare.request_id,
            queries=queries,
            documents=documents,
            instruction=instruction,
            options=_options(bare),
        )
    except (TypeError, UnicodeEncodeError):
        raise InvalidRequestError("documents", documents, "must be texts in valid Unicode, as must queries") from None


def pooled_outputs(response: inference_pb2.PoolResponse) -> PooledOutputs:
    """Results of a response."""
    outputs = [PooledOutput(tuple(one.values), one.prompt_tokens, one.cached_tokens) for one in response.outputs]
    return PooledOutputs(response.model, tuple(outputs), tuple(response.labels))


def floats_of(values: bytes) -> "array[float]":
    """Numbers of a pooled result, float32."""
    return array("f", values)


# --- inside ---


def _bare(
    model: str, request_id: str, options: inference_pb2.PoolingOptions, dimensions: int | None, *, is_pairs: bool
) -> GenerationRequest:
    names = score_names if is_pairs else pool_names
    priority = PRIORITIES_READ.get(options.priority)
    if priority is None:
        raise InvalidRequestError("options.priority", options.priority, "must be a value of holdfast.v1.Priority")
    if options.truncate_left and options.truncate_right:
        raise InvalidRequestError("options.truncate_left", True, "must not be set with truncate_right")
    given = {name: getattr(options, name) for name in _OPTIONAL if options.HasField(name)}
    try:
        return GenerationRequest(
            model=model,
            request_id=request_id,
            priority=priority,
            timeout_s=given["timeout_ms"] / 1000 if "timeout_ms" in given else None,
            cache_salt=options.cache_salt,
            tenant=options.tenant,
            names=names,
            pooling=PoolingParams(dimensions=dimensions, use_activation=given.get("use_activation")),
            sampling_params=truncating(given.get("truncate_prompt_tokens"), "left" if options.truncate_left else None),
        )
    except InvalidRequestError as error:
        raise names().error(error) from None


_OPTIONAL: Final = ("use_activation", "truncate_prompt_tokens", "timeout_ms")


def _options(bare: GenerationRequest) -> inference_pb2.PoolingOptions:
    params = bare.sampling_params
    options = inference_pb2.PoolingOptions(
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncate_left=params.truncate_prompt_tokens is not None and not params.truncate_right,
        priority=PRIORITIES[bare.priority],
        timeout_ms=timeout_in_ms(bare.timeout_s),
        cache_salt=bare.cache_salt,
        tenant=bare.tenant,
    )
    if bare.pooling is not None and bare.pooling.use_activation is not None:
        options.use_activation = bare.pooling.use_activation
    return options


def _input(number: int, message: inference_pb2.PoolInput) -> str | tuple[int, ...]:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(in_pieces(message.token_ids.ids))
        case _:
            raise InvalidRequestError(f"inputs[{number}]", None, "one of text and token_ids must be set")


def _input_message(number: int, prompt: str | Sequence[int]) -> inference_pb2.PoolInput:
    try:
        if isinstance(prompt, str):
            return inference_pb2.PoolInput(text=prompt)
        return inference_pb2.PoolInput(token_ids=inference_pb2.TokenIds(ids=prompt))
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"inputs[{number}]", prompt, f"must be valid Unicode: {error.reason}") from None
    except (TypeError, ValueError):
        raise InvalidRequestError(f"inputs[{number}]", prompt, TOKEN_IDS) from None
