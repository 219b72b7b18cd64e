"""Sampling parameters of OpenAI-style bodies: what their fields say, as `SamplingParams` and service classes.

Null means the default everywhere. What may not live here: ranges (`worker/sampling_params.py` checks them).
"""

from collections.abc import Mapping
from typing import Any, Final

from holdfast.router.doors.http.bodies import Body, ChatBody, CompletionBody
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

_SAME: Final = [
    "n",
    "best_of",
    "temperature",
    "top_p",
    "min_p",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
]
"""Fields that mean what the parameter of their name does."""

_OLD_STRUCTURES: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_MOST_SEEDS: Final = 2**63


def chat_params(body: ChatBody, structure: StructuredOutputs | None = None) -> SamplingParams:
    """The parameters of a chat. `structure` is what tools ask for. Raises `InvalidRequestError`."""
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequestError("top_logprobs", body.top_logprobs, "must come with logprobs = true")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _params(body, structure, max_tokens=max_tokens, logprobs=logprobs)


def completion_params(body: CompletionBody) -> SamplingParams:
    """The parameters of a completion. Raises `InvalidRequestError`."""
    changes: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": body.logprobs, "echo": bool(body.echo)}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = body.logprobs
    return _params(body, None, **changes)


def _params(body: Body, structure: StructuredOutputs | None, **own: Any) -> SamplingParams:
    """Those of all bodies, with an endpoint's own."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)  # -1 means all, too
    if body.seed is not None:
        given["seed"] = body.seed % _MOST_SEEDS
    if body.logit_bias:
        given["logit_bias"] = _biases(body.logit_bias)
    if body.use_beam_search:
        given |= {"beam_width": body.n or 1, "n": body.n or 1}
        given |= {} if body.length_penalty is None else {"length_penalty": body.length_penalty}
    structure = structure or _structure(body)
    if structure is not None:
        given["structured_outputs"] = structure
    return SamplingParams(**{**given, **own})


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise InvalidRequestError("logit_bias", list(given)[:10], "must have token ids as its keys") from None


def _structure(body: Body) -> StructuredOutputs | None:
    """The shape of the output, in any of its spellings; at most one of them may be there."""
    found: dict[str, object] = {}
    if body.structured_outputs is not None:
        chosen = {name: value for name, value in body.structured_outputs.items() if value not in (None, False)}
        found["structured_outputs"] = StructuredOutputs.of(chosen)
    for old, name in _OLD_STRUCTURES.items():
        if (value := getattr(body, old)) is not None:
            found[old] = StructuredOutputs.of({name: value})
    if (shape := _format(body)) is not None:
        found["response_format"] = shape
    if len(found) > 1:
        raise InvalidRequestError("response_format", sorted(found), "must be the only one that asks for a shape")
    return next(iter(found.values()), None)  # type: ignore[return-value]  # all of them are


def _format(body: Body) -> StructuredOutputs | None:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True)
    if asked.type == "json_schema":
        schema = (asked.json_schema or {}).get("schema")
        if not isinstance(schema, Mapping):
            raise InvalidRequestError("response_format.json_schema.schema", schema, "must be a JSON schema")
        return StructuredOutputs(json=dict(schema))
    raise InvalidRequestError("response_format.type", asked.type, "is not supported")


def priority_of(body: Body) -> Priority:
    """A class by its name; of vLLM's numbers, of which lower ones go first, 0 is normal."""
    if body.priority is None:
        return Priority.NORMAL
    if isinstance(body.priority, str):
        return Priority[body.priority.upper()]
    return Priority.NORMAL if body.priority == 0 else Priority.HIGH if body.priority < 0 else Priority.LOW
