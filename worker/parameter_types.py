"""Whether the fields of `SamplingParams` are of the types that they say, whoever filled them in.

What may not live here: limits of their values, which `SamplingParams` checks afterwards by plain comparison.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.structured_outputs import StructuredOutputs
from holdfast.worker.value_types import PLAIN, is_flag, is_number, is_text, is_whole, plain_number

Check = Callable[[object], bool]


def check_types(params: object) -> None:
    """Raises `InvalidRequestError`, naming the field. None is left to the fields that may be None."""
    for names, check, wish in _CHECKS:
        for name in names:
            value = getattr(params, name)
            if not check(value) and not (value is None and name in _MAY_BE_NONE):
                raise InvalidRequestError(f"sampling_params.{name}", value, wish)


def plain_values(params: object) -> dict[str, object]:
    """What other libraries' numbers are as Python's own, by field: those have no limits, and every wire takes them.

    The types must have been checked.
    """
    values = {name: getattr(params, name) for names, _, _ in _CHECKS[:2] for name in names}
    plain = {name: plain_number(value) for name, value in values.items() if type(value) not in PLAIN}
    return {name: value for name, value in plain.items() if value is not None}


def _is_whole_of_64_bits(value: object) -> bool:
    return is_whole(value) and -(2**64) < value < 2**64


def _are_texts(value: object) -> bool:
    return is_text(value) if isinstance(value, str) else isinstance(value, Collection) and all(map(is_text, value))


def _are_token_ids(value: object) -> bool:
    if isinstance(value, str | bytes | bytearray | memoryview):
        return False
    return isinstance(value, Collection) and all(map(is_whole, value))


def _are_biases(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(is_whole, value)) and all(map(is_number, value.values()))


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
        is_number,
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
        _is_whole_of_64_bits,
        "must be a whole number, of 64 bits at most",
    ),
    (
        ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"),
        is_flag,
        "must be True or False",
    ),
    (("stop", "bad_words"), _are_texts, "must be text, or a list of texts, in valid Unicode"),
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
