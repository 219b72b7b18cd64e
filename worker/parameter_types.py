"""Whether the fields of `SamplingParams` are of the types that they say, whoever filled them in.

What may not live here: limits of their values, which `SamplingParams` checks afterwards by plain comparison.
"""

from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Final

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.structured_outputs import StructuredOutputs

Check = Callable[[object], bool]


def check_types(params: object) -> None:
    """Raises `InvalidRequestError`, naming the field. None is left to the fields that may be None."""
    for names, check, wish in _CHECKS:
        for name in names:
            value = getattr(params, name)
            if not check(value) and not (value is None and name in _MAY_BE_NONE):
                raise InvalidRequestError(f"sampling_params.{name}", value, wish)


def _is_whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_number(value: object) -> bool:
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Collection) and all(isinstance(item, str) for item in value))


def _are_token_ids(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes) and all(map(_is_whole, value))


def _are_biases(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_whole, value)) and all(map(_is_number, value.values()))


def _is_structure(value: object) -> bool:
    return isinstance(value, StructuredOutputs | Mapping)


_CHECKS: Final[tuple[tuple[tuple[str, ...], Check, str], ...]] = (
    (
        (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "length_penalty",
        ),
        _is_number,
        "must be a number",
    ),
    (
        (
            "top_k",
            "seed",
            "max_tokens",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
            "n",
            "best_of",
            "truncate_prompt_tokens",
            "beam_width",
        ),
        _is_whole,
        "must be a whole number",
    ),
    (
        ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"),
        _is_flag,
        "must be True or False",
    ),
    (("stop", "bad_words"), _are_texts, "must be text, or a list of texts"),
    (("stop_token_ids", "allowed_token_ids"), _are_token_ids, "must be a list of token ids"),
    (("logit_bias",), _are_biases, "must give token ids numbers"),
    (("structured_outputs",), _is_structure, "must be StructuredOutputs, or a mapping of its fields"),
)

_MAY_BE_NONE: Final = {
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
    "best_of",
    "truncate_prompt_tokens",
    "beam_width",
}
