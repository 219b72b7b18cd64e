"""Between `SamplingParams` and their message, both ways.

What may not live here: what the parameters mean, and their limits (`worker/sampling_params.py`).
"""

import struct
from typing import Final

from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

_OPTIONAL: Final = (
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "skip_special_tokens",
    "logprobs",
    "n",
    "best_of",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "beam_width",
)
_OPTIONAL_FLOATS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
)


# --- from the wire ---


def sampling_params(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Only what is set overrides a default: zero means something."""
    params = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    params |= {name: _shortest_decimal(getattr(message, name)) for name in _OPTIONAL_FLOATS if message.HasField(name)}
    if message.no_max_tokens:
        _check_no_max_tokens(message)
        params["max_tokens"] = None
    return SamplingParams(
        **params,
        echo=message.echo,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias={token_id: _shortest_decimal(bias) for token_id, bias in message.logit_bias.items()},
        allowed_token_ids=message.allowed_token_ids or None,
        bad_words=message.bad_words,
        include_stop_str_in_output=message.include_stop_str_in_output,
        structured_outputs=_structured(message.structured_outputs) if message.HasField("structured_outputs") else None,
    )


def _check_no_max_tokens(message: inference_pb2.SamplingParams) -> None:
    if message.HasField("max_tokens"):
        limit = "must not be set with no_max_tokens"
        raise InvalidRequestError("sampling_params.max_tokens", message.max_tokens, limit)


def _structured(message: inference_pb2.StructuredOutputs) -> dict[str, object]:
    kind = message.WhichOneof("kind")
    if kind is None:
        return {}
    return {kind: tuple(message.choice.texts) if kind == "choice" else getattr(message, kind)}


def _shortest_decimal(value: float) -> float:
    """The double that a 32-bit float was most likely written as: 0.7 rather than 0.699999988.

    So a request draws the same tokens over the wire as in process, where parameters are doubles.
    """
    for num_digits in (6, 7, 8):
        short = float(f"{value:.{num_digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value


# --- to the wire ---


def sampling_params_message(params: SamplingParams) -> inference_pb2.SamplingParams:
    message = inference_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        stop=params.stop_strings,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=params.logprobs,
        n=params.n,
        best_of=params.best_of,
        echo=params.echo,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        prompt_logprobs=params.prompt_logprobs,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        max_tokens=params.max_tokens,
        no_max_tokens=params.max_tokens is None,
        seed=params.seed,
    )
    if params.structure is not None:
        message.structured_outputs.CopyFrom(_structured_outputs(params.structure))
    return message


def _structured_outputs(wish: StructuredOutputs) -> inference_pb2.StructuredOutputs:
    if wish.choice is not None:
        return inference_pb2.StructuredOutputs(choice=inference_pb2.Choice(texts=wish.choice))
    return inference_pb2.StructuredOutputs(**{wish.kind: getattr(wish, wish.kind)})
