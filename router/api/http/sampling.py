"""Sampling parameters of bodies: every declared parameter under its own name, and what clients spell differently.

Null means the default everywhere.
"""

from collections.abc import Mapping
from typing import Any, Final

from holdfast.router.api.http.bodies import Body, ChatBody, CompletionBody
from holdfast.router.api.http.json_body import Reads
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import by_token_id
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs
from holdfast.worker.value_types import is_flag, is_text


def chat_params(body: ChatBody) -> SamplingParams:
    """The parameters of a chat. Raises `InvalidRequestError`."""
    renamed = {name: value for name, value in body.given_renamed().items() if name in PARAMETERS}
    own: dict[str, Any] = {"max_tokens": body.given("max_tokens"), "logprobs": 0, **renamed}
    if not body.logprobs:
        own["logprobs"] = None
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs", body.top_logprobs, "must come with logprobs = true")
    own["structured_outputs"] = structure_of(body)
    return declared_params(body, **own)


def completion_params(body: CompletionBody) -> SamplingParams:
    """The parameters of a completion. Where only the prompt is scored, one token is drawn and not sent. Raises
    `InvalidRequestError`.
    """
    own: dict[str, Any] = {}
    if scores_only(body):
        own["max_tokens"] = 1
    elif "max_tokens" in body.model_fields_set and body.given("max_tokens") is None:
        own["max_tokens"] = None
    if body.given("echo") and body.given("logprobs") is not None and body.given("prompt_logprobs") is None:
        own["prompt_logprobs"] = body.given("logprobs")
    if (structure := structure_of(body)) is not None:
        own["structured_outputs"] = structure
    return declared_params(body, **own)


def scores_only(body: CompletionBody) -> bool:
    """Whether a completion is to have no output."""
    return body.given("max_tokens") == 0 and bool(body.given("echo"))


def declared_params(body: Reads, **own: Any) -> SamplingParams:
    """All declared parameters that a body gives by name, with values as other people's clients write them, and
    an endpoint's own.
    """
    given = {name: value for name in PARAMETERS if (value := body.given(name)) is not None}
    if isinstance(body, Body) and body.use_beam_search:
        given |= {"beam_width": given.get("n", 1)}
    if isinstance(body, Body) and body.truncation_side is not None:
        given |= {"truncate_right": body.truncation_side == "right"}
    if "logit_bias" in given:
        given["logit_bias"] = by_token_id(given["logit_bias"])
    return SamplingParams(**{**given, **own})


_ABOUT_SCHEMAS: Final = (
    ("name", is_text, "text"),
    ("description", is_text, "text"),
    ("strict", is_flag, "true or false"),
)
"""Fields that describe a schema. All are enforced."""


def structure_of(body: Body) -> StructuredOutputs | None:
    """The shape of the output, in any of its spellings; at most one of them may be there."""
    found: dict[str, StructuredOutputs] = {}
    if (asked := body.given("structured_outputs")) is not None:
        if not isinstance(asked, Mapping):
            raise InvalidRequestError("structured_outputs", asked, 'must be an object, as {"regex": "[0-9]+"}')
        chosen = {name: value for name, value in asked.items() if value not in (None, False)}
        found["structured_outputs"] = StructuredOutputs.of(chosen)
    for old, name in body.renamed.items():
        if old.startswith("guided_") and (value := getattr(body, old)) is not None:
            found[old] = StructuredOutputs.of({name.rpartition(".")[2]: value})
    if (shape := _format(body)) is not None:
        found["response_format"] = shape
    if len(found) > 1:
        field, *others = found
        limit = f"conflicts with {', '.join(others)}: each sets the output's structure"
        raise InvalidRequestError(field, sorted(found), limit)
    return next(iter(found.values()), None)


def _format(body: Body) -> StructuredOutputs | None:
    asked = body.response_format
    if asked is not None and asked.type != "json_schema" and asked.json_schema is not None:
        limit = "must come with type = json_schema"
        raise InvalidRequestError("response_format.json_schema", asked.json_schema, limit)
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True)
    if asked.type == "json_schema":
        about = asked.json_schema or {}
        for name, is_right, wish in _ABOUT_SCHEMAS:
            if about.get(name) is not None and not is_right(about[name]):
                raise InvalidRequestError(f"response_format.json_schema.{name}", about[name], f"must be {wish}")
        schema = about.get("schema")
        if not isinstance(schema, Mapping) and schema is not True:
            raise InvalidRequestError("response_format.json_schema.schema", schema, "must be a JSON schema")
        return StructuredOutputs(json=schema)
    raise InvalidRequestError("response_format.type", asked.type, "is not supported")


RETENTIONS: Final[Mapping[str | None, int]] = {"in_memory": 300, "24h": 24 * 3600}
"""Seconds for which OpenAI's policies keep a prompt."""


def service_of(body: Body, tenant: str) -> dict[str, Any]:
    """Fields that all bodies have in common, whatever their prompt."""
    return {
        "model": body.model or "",
        "request_id": body.request_id or "",
        "priority": priority_of(body.priority),
        "timeout_s": body.timeout,
        "cache_salt": body.cache_salt or "",
        "session_id": body.session,
        "cache_ttl_s": RETENTIONS.get(body.prompt_cache_retention, 0) if body.cache_ttl_s is None else body.cache_ttl_s,
        "cache_prefix_tokens": body.cache_prefix_tokens or 0,
        "tenant": tenant,
        "names": body.names,
    }


def priority_of(given: int | str | None) -> Priority:
    """A class by its name; of vLLM's numbers, of which lower ones go first, 0 is normal."""
    if given is None:
        return Priority.NORMAL
    if isinstance(given, str):
        return Priority[given.upper()]
    return Priority.of_number(given)
