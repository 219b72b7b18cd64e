"""Static bounds of every field of the messages that a router takes, by protocol: one table, from `LimitsConfig`.

They hold for a whole message, wherever in it a field stands, and are checked on its bytes (`worker/wire/
message_bounds.py`). A field that can grow and is not here fails a test, and the start.
"""

from typing import Final

from holdfast.router.config import LimitsConfig
from holdfast.router.request import LIST_LIMITS, MAX_INPUTS
from holdfast.v1 import inference_pb2
from holdfast.worker.parameters import MAX_LOGPROB_TOKEN_IDS
from holdfast.worker.wire.bound import Bound
from holdfast.worker.wire.message_bounds import Bounds, MessageBounds

MAX_NAME_BYTES: Final = 1024
"""Most bytes of a model, a service, a version, a level: names that somebody has chosen once."""

MAX_CHUNK_BYTES: Final = 4 * 2**20
"""Most bytes of an HTTP body's chunk from a gateway: the longest message of a gRPC server by default."""

MAX_PARAMETER_BYTES: Final = 4 * 2**20
"""Most bytes of sampling parameters as JSON text, which may list a whole vocabulary."""

INLINE_BYTES: Final = 4 * 2**10
"""Messages up to this size are decoded where they arrive: a thread's wake-up would take longer."""

_UTF8: Final = 4
"""Bytes of a character at most."""

_NAME: Final = Bound(size=MAX_NAME_BYTES)
_SETTINGS: Final = Bound(size=2**20)
"""Bound of a model's settings as JSON text, which may hold a chat template."""


def public_bounds(limits: LimitsConfig) -> Bounds:
    """Bounds by message and field, for everything that is served on a router's ports."""
    return {**_inference(limits), **_open_inference(limits), **_vllm_engine(limits), **_CONTROL, **_ENDPOINT_PICKER}


def generation_bounds(limits: LimitsConfig) -> MessageBounds:
    """Bounds of a `GenerateRequest`, in the form that checks its bytes."""
    return MessageBounds.of(inference_pb2.GenerateRequest.DESCRIPTOR, public_bounds(limits))


def _inference(limits: LimitsConfig) -> Bounds:
    identifier = Bound(size=_UTF8 * limits.max_request_id_length, setting="limits.max_request_id_length")
    text = Bound(size=limits.max_prompt_bytes, setting="limits.max_prompt_bytes")
    grammar = Bound(size=_UTF8 * limits.max_grammar_length, setting="limits.max_grammar_length")
    tokens = Bound(count=limits.max_prompt_tokens, setting="limits.max_prompt_tokens")
    texts = Bound(count=MAX_INPUTS, size=limits.max_prompt_bytes, setting="limits.max_prompt_bytes")
    return {
        "holdfast.v1.GenerateRequest": {
            "model": _NAME,
            "request_id": identifier,
            "text": text,
            "cache_salt": identifier,
            "tenant": identifier,
            "session_id": identifier,
        },
        "holdfast.v1.TokenIds": {"ids": tokens},
        "holdfast.v1.Chat": {
            "messages": Bound(count=limits.max_messages, setting="limits.max_messages"),
            "template_kwargs": text,
            "template": _NAME,
            "tools": Bound(count=limits.max_tools, setting="limits.max_tools"),
        },
        "holdfast.v1.ChatMessage": {
            **dict.fromkeys(("role", "content", "tool_call_id", "name", "reasoning"), text),
            "tool_calls": Bound(count=limits.max_messages, setting="limits.max_messages"),
        },
        "holdfast.v1.Tool": dict.fromkeys(("name", "description", "parameters"), text),
        "holdfast.v1.ToolChoice": {"name": _NAME},
        "holdfast.v1.ToolCall": dict.fromkeys(("id", "name", "arguments"), text),
        "holdfast.v1.Resume": {
            "sequences": Bound(count=limits.max_sequences, setting="limits.max_sequences"),
            "system_fingerprint": _NAME,
        },
        "holdfast.v1.SequenceProgress": {"token_ids": tokens},
        "holdfast.v1.SamplingParams": {
            **{name: _of_list(name, limits) for name in LIST_LIMITS},
            "logprob_token_ids": Bound(count=MAX_LOGPROB_TOKEN_IDS),
        },
        "holdfast.v1.StructuredOutputs": dict.fromkeys(("json", "regex", "grammar"), grammar),
        "holdfast.v1.Choice": {"texts": Bound(count=limits.max_choices, size=grammar.size, setting=grammar.setting)},
        "holdfast.v1.PoolRequest": {"model": _NAME, "request_id": identifier, "inputs": Bound(count=MAX_INPUTS)},
        "holdfast.v1.PoolInput": {"text": text},
        "holdfast.v1.PoolingOptions": {"cache_salt": identifier, "tenant": identifier},
        "holdfast.v1.ScoreRequest": {
            "model": _NAME,
            "request_id": identifier,
            **dict.fromkeys(("queries", "documents"), texts),
            "instruction": text,
        },
        "holdfast.v1.AbortRequest": {"request_id": identifier},
        "holdfast.v1.TokenizeRequest": {"model": _NAME, "text": text},
        "holdfast.v1.DetokenizeRequest": {"model": _NAME, "token_ids": tokens},
    }


def _of_list(parameter: str, limits: LimitsConfig) -> Bound:
    """Bound of a sampling parameter with several elements."""
    limit = LIST_LIMITS[parameter]
    count, setting = getattr(limits, limit.count), f"limits.{limit.count}"
    if not limit.length:
        return Bound(count=count, setting=setting)
    return Bound(count=count, size=_UTF8 * count * getattr(limits, limit.length), setting=setting)


def _open_inference(limits: LimitsConfig) -> Bounds:
    few = Bound(count=64, size=64 * MAX_NAME_BYTES)
    names = Bound(size=64 * MAX_NAME_BYTES)
    contents = Bound(count=64, size=limits.max_prompt_bytes + MAX_PARAMETER_BYTES)
    numbers = ("bool", "int", "int64", "uint", "uint64", "fp32", "fp64")
    model = {"name": _NAME, "version": _NAME}
    return {
        "inference.ModelInferRequest": {
            "model_name": _NAME,
            "model_version": _NAME,
            "id": Bound(size=MAX_NAME_BYTES),
            "parameters": Bound(count=1024, size=contents.size),
            "inputs": few,
            "outputs": few,
            "raw_input_contents": contents,
        },
        "inference.ModelInferRequest.InferInputTensor": {
            "name": names,
            "datatype": names,
            "shape": Bound(count=1024),
            "parameters": few,
        },
        "inference.ModelInferRequest.InferRequestedOutputTensor": {"name": names, "parameters": few},
        "inference.InferParameter": {"string_param": contents},
        "inference.InferTensorContents": {
            **{f"{kind}_contents": Bound(count=1024) for kind in numbers},
            "bytes_contents": contents,
        },
        **{
            f"inference.{name}Request": model
            for name in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
        },
    }


def _vllm_engine(limits: LimitsConfig) -> Bounds:
    own = _inference(limits)
    grammar = own["holdfast.v1.StructuredOutputs"]["grammar"]
    request = own["holdfast.v1.GenerateRequest"]
    return {
        "vllm.grpc.engine.GenerateRequest": {
            "request_id": request["request_id"],
            "text": request["text"],
            "kv_transfer_params_json": Bound(size=64 * MAX_NAME_BYTES),
            "extra_mm_inputs": Bound(count=64),
        },
        "vllm.grpc.engine.TokenizedInput": {
            "original_text": Bound(size=2 * limits.max_prompt_bytes + MAX_PARAMETER_BYTES),  # it is not read
            "input_ids": own["holdfast.v1.TokenIds"]["ids"],
        },
        "vllm.grpc.engine.SamplingParams": {
            **{name: _of_list(name, limits) for name in ("stop", "stop_token_ids", "logit_bias")},
            **dict.fromkeys(("json_schema", "regex", "grammar", "structural_tag"), grammar),
        },
        "vllm.grpc.engine.ChoiceConstraint": {"choices": own["holdfast.v1.Choice"]["texts"]},
        "vllm.grpc.engine.AbortRequest": {"request_ids": Bound(count=1024, size=1024 * MAX_NAME_BYTES)},
        "vllm.grpc.engine.GetLoadsRequest": {"include": Bound(count=64, size=64 * MAX_NAME_BYTES)},
    }


_CONTROL: Final[Bounds] = {
    "holdfast.v1.DrainRequest": {"replica_id": _NAME},
    "holdfast.v1.UndrainRequest": {"replica_id": _NAME},
    "holdfast.v1.PauseRequest": {"model": _NAME},
    "holdfast.v1.ResumeRequest": {"model": _NAME},
    "holdfast.v1.LoadAdapterRequest": dict.fromkeys(("name", "path", "model"), _NAME),
    "holdfast.v1.UnloadAdapterRequest": {"name": _NAME},
    "holdfast.v1.SetLogLevelRequest": {"level": _NAME},
    "holdfast.v1.UnpinRequest": dict.fromkeys(("tenant", "prefix"), _NAME),
    "holdfast.v1.AddModel": {"settings": _SETTINGS},
    "holdfast.v1.UpdateModel": {"model": _NAME, "settings": _SETTINGS},
    "holdfast.v1.RollbackModel": {"model": _NAME},
    "holdfast.v1.RemoveModel": {"model": _NAME},
    "holdfast.v1.ScaleModel": {"model": _NAME},
    "holdfast.v1.ReadLogsRequest": {"process": _NAME},
    "grpc.health.v1.HealthCheckRequest": {"service": _NAME},
    "grpc.reflection.v1alpha.ServerReflectionRequest": dict.fromkeys(
        ("host", "file_by_filename", "file_containing_symbol", "all_extension_numbers_of_type", "list_services"), _NAME
    ),
    "grpc.reflection.v1alpha.ExtensionRequest": {"containing_type": _NAME},
}

_HEADERS: Final = Bound(size=256 * 2**10)
"""Bound of an HTTP request's headers from a gateway: more than gateways let in."""

_ENDPOINT_PICKER: Final[Bounds] = {
    "envoy.service.ext_proc.v3.HttpBody": {"body": Bound(size=MAX_CHUNK_BYTES)},
    "envoy.service.ext_proc.v3.HeaderMap": {"headers": Bound(count=1024)},
    "envoy.service.ext_proc.v3.HeaderValue": dict.fromkeys(("key", "value", "raw_value"), _HEADERS),
    "envoy.service.ext_proc.v3.Metadata": {"filter_metadata": Bound(count=64, size=_HEADERS.size)},
    "envoy.service.ext_proc.v3.Struct": {"fields": Bound(count=4096, size=_HEADERS.size)},
    "envoy.service.ext_proc.v3.Value": {"string_value": _HEADERS},
    "envoy.service.ext_proc.v3.ListValue": {"values": Bound(count=4096)},
}
