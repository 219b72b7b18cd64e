"""OpenAPI description of the HTTP API, made from the bodies that the endpoints read and the declared parameters."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from holdfast.router.api.http.admin import AdminEndpoints
from holdfast.router.api.http.batches import BatchEndpoints
from holdfast.router.api.http.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from holdfast.router.api.http.conversations import ConversationEndpoints
from holdfast.router.api.http.files import MULTIPART, PURPOSES
from holdfast.router.api.http.json_body import Reads
from holdfast.router.api.http.message_batches import MessageBatchEndpoints
from holdfast.router.api.http.messages_body import CountBody, MessagesBody
from holdfast.router.api.http.pooling import PoolingEndpoints
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.router.api.http.stored_chats import StoredChats
from holdfast.worker.parameters import STRUCTURE, TEXTS, Kind, Metadata, Parameter
from holdfast.worker.sampling_params import PARAMETERS

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_BODIES: Final[Mapping[str, tuple[type[Reads], str, bool]]] = {
    "/v1/chat/completions": (ChatBody, "Continue a chat.", True),
    "/v1/completions": (CompletionBody, "Continue one prompt or several.", True),
    "/v1/responses": (ResponsesBody, "Continue a conversation, in OpenAI's newer shape.", True),
    "/v1/responses/input_tokens": (ResponsesBody, "Count the tokens of a response's input.", False),
    "/v1/messages": (MessagesBody, "Continue a conversation, in Anthropic's shape.", True),
    "/v1/messages/count_tokens": (CountBody, "Count the tokens of a conversation.", False),
    **{path: (*body, False) for path, body in PoolingEndpoints.bodies.items()},
    "/tokenize": (TokenizeBody, "Token ids of a prompt or a chat.", False),
    "/detokenize": (DetokenizeBody, "The text of token ids.", False),
}
_READS: Final = {
    "/v1/models": "The models that are served.",
    "/version": "The version of the server.",
    "/load": "Open requests, and the load of each replica.",
    "/cluster": "Replicas, queue lengths and recent events. For operators.",
}
_ERRORS: Final = {
    "400": "a field is wrong; the message names it",
    "404": "there is no such model or path",
    "409": "the same request was sent once more",
    "429": "the queue is full",
    "503": "no replica is up, or the router stops",
    "504": "the request's time is up",
}
_OF_ANTHROPIC: Final = "/v1/messages"
_OTHERS_WORDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "seed": {"type": "integer"},
    "top_k": {"type": "integer"},
    "max_tokens": {"type": "integer", "minimum": 0},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
}
"""Parameters that this API takes in more values than are declared, or in other ones."""


@cache
def description() -> dict[str, Any]:
    """The whole document."""
    others = {**AdminEndpoints.bodies, **_STORED_BODIES}
    posts = {**_BODIES, **{path: (*body, False) for path, body in others.items()}}
    models = {model for model, _, _ in posts.values()}
    _, defined = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda one: one.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Any] = defined["$defs"]
    for model in models:
        properties = schemas[model.__name__]["properties"]
        declared = {name: _schema(one) for name, one in PARAMETERS.items() if name not in properties}
        schemas[model.__name__]["properties"] = properties | (declared if _draws(model) else {})
    paths: dict[str, Any] = {path: {"post": _post(path, *body)} for path, body in _BODIES.items()}
    paths |= {path: {"get": _get(summary, {"type": "object"})} for path, summary in _READS.items()}
    paths |= {path: {"post": _order(path, *body)} for path, body in AdminEndpoints.bodies.items()}
    paths["/admin/pins"] = {"get": _of_operators(_get("The prefixes that replicas keep on request.", _OBJECT))}
    paths["/admin/state"] = {"get": _of_operators(_get("A dump of the router's state, for a bug report.", _OBJECT))}
    paths["/v1/models/{model}"] = {
        "get": {**_get("One of them.", {"type": "object"}), "parameters": [_in_path("model")]}
    }
    paths |= {path: {"get": _state(path)} for path in ("/health", "/ready", "/ping")}
    _add_stored(paths)
    paths["/metrics"] = {"get": {"summary": "Figures for Prometheus.", "responses": {"200": _content("text/plain")}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast", "version": version("holdfast")},
        "paths": paths,
        "components": {"schemas": schemas | _ERROR_SCHEMAS},
    }


_PAGED: Final = (("after", "string"), ("limit", "integer"), ("order", "string"))
_STORED: Final[Mapping[str, Mapping[str, tuple[str, tuple[tuple[str, str], ...]]]]] = {
    "/v1/responses/{response_id}": {
        "get": (
            "A stored response, or the events of a response that is computed in the background.",
            (("stream", "boolean"), ("starting_after", "integer")),
        ),
        "delete": ("Deletes a stored response.", ()),
    },
    "/v1/responses/{response_id}/cancel": {"post": ("Ends a background response.", ())},
    "/v1/responses/{response_id}/input_items": {"get": ("The input of a stored response, in pages.", _PAGED)},
    "/v1/chat/completions": {"get": ("Stored chat completions, in pages.", (*_PAGED, ("model", "string")))},
    "/v1/chat/completions/{completion_id}": {
        "get": ("A stored chat completion.", ()),
        "delete": ("Deletes a stored chat completion.", ()),
    },
    "/v1/chat/completions/{completion_id}/messages": {
        "get": ("The messages that a stored chat completion answers, in pages.", _PAGED)
    },
    "/v1/conversations/{conversation_id}": {
        "get": ("A stored conversation.", ()),
        "delete": ("Deletes a conversation and its items.", ()),
    },
    "/v1/conversations/{conversation_id}/items": {"get": ("The items of a conversation, in pages.", _PAGED)},
    "/v1/conversations/{conversation_id}/items/{item_id}": {
        "get": ("One item of a conversation.", ()),
        "delete": ("Deletes an item of a conversation.", ()),
    },
    "/v1/files": {"get": ("Stored files, in pages.", (*_PAGED, ("purpose", "string")))},
    "/v1/files/{file_id}": {"get": ("A stored file.", ()), "delete": ("Deletes a file.", ())},
    "/v1/files/{file_id}/content": {"get": ("The content of a file.", ())},
    "/v1/batches": {"get": ("Batches, in pages.", _PAGED)},
    "/v1/batches/{batch_id}": {"get": ("A batch, with its counts.", ())},
    "/v1/batches/{batch_id}/cancel": {"post": ("Ends a batch; results so far are kept.", ())},
    "/v1/messages/batches": {
        "get": (
            "Message batches, in pages.",
            (("before_id", "string"), ("after_id", "string"), ("limit", "integer")),
        )
    },
    "/v1/messages/batches/{message_batch_id}": {
        "get": ("A message batch, with its counts.", ()),
        "delete": ("Deletes a message batch that has ended, and its results.", ()),
    },
    "/v1/messages/batches/{message_batch_id}/cancel": {"post": ("Ends a message batch; results so far are kept.", ())},
    "/v1/messages/batches/{message_batch_id}/results": {"get": ("The results of a message batch, a line each.", ())},
}
"""Endpoints of stored objects (`router.store`): the purpose by path and method, and the query's parameters."""

_STORED_BODIES: Final = {
    **ConversationEndpoints.bodies,
    **StoredChats.bodies,
    **BatchEndpoints.bodies,
    **MessageBatchEndpoints.bodies,
}


def _add_stored(paths: dict[str, Any]) -> None:
    for path, (body, summary) in _STORED_BODIES.items():
        paths.setdefault(path, {})["post"] = _post(path, body, summary, streams=False)
    for path, methods in _STORED.items():
        for method, (summary, query) in methods.items():
            described = {**_get(summary, _OBJECT, path), "parameters": [_query(*one) for one in query]}
            paths.setdefault(path, {})[method] = described
    paths["/v1/files"]["post"] = _upload()
    paths["/v1/files/{file_id}/content"]["get"]["responses"]["200"] = _content("application/octet-stream")
    results = paths["/v1/messages/batches/{message_batch_id}/results"]["get"]
    results["responses"]["200"] = _content("application/x-jsonl")
    for path in {*_STORED, *_STORED_BODIES}:
        if names := re.findall(r"{(\w+)}", path):
            paths[path]["parameters"] = [_in_path(name) for name in names]


def _upload() -> dict[str, Any]:
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": list(PURPOSES)}},
    }
    body = {"required": True, "content": {MULTIPART: {"schema": form}}}
    return {**_get("Stores a file.", _OBJECT), "requestBody": body}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": kind}}


def _draws(model: type[Reads]) -> bool:
    return issubclass(model, Body | MessagesBody | ResponsesBody)


def _schema(parameter: Parameter) -> dict[str, Any]:
    """Schema of one parameter's values; the default of each is null."""
    if parameter.name in _OTHERS_WORDS:
        schema = {**_OTHERS_WORDS[parameter.name]}
    elif parameter.kind is STRUCTURE:
        schema = {"type": "object"}
    else:
        constraints = [item for item in parameter.field.metadata if not isinstance(item, Kind | Metadata)]
        annotated: Any = Annotated
        schema = TypeAdapter(annotated[(parameter.kind.stored_as, None, *constraints)]).json_schema()
        if parameter.kind is TEXTS:
            schema = {"anyOf": [{"type": "string", "minLength": 1}, schema]}
    return {"anyOf": [schema, {"type": "null"}], "description": parameter.help}


def _post(path: str, body: type[Reads], summary: str, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": {"type": "object"}}}
    if streams:
        content[_EVENTS] = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}  # of each event
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}},
        },
        "responses": {"200": {"description": "the answer", "content": content}, **_errors(path)},
    }


def _order(path: str, body: type[Reads], summary: str) -> dict[str, Any]:
    order = _of_operators(_post(path, body, summary, streams=False))
    return order | ({"parameters": [_in_path("replica_id")]} if "{replica_id}" in path else {})


def _of_operators(operation: dict[str, Any]) -> dict[str, Any]:
    operation["responses"]["403"] = _error("", "the caller is not an operator")
    return operation


def _get(summary: str, schema: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    answer = {"description": summary, "content": {_JSON: {"schema": schema}}}
    return {"summary": summary, "responses": {"200": answer, **_errors(path)}}


def _state(path: str) -> dict[str, Any]:
    answers = {"200": {"description": "a model has a replica up"}, "503": _error("", _ERRORS["503"])}
    return {"summary": "Whether requests can be served.", "responses": answers}


def _content(media_type: str) -> dict[str, Any]:
    return {"description": "the figures", "content": {media_type: {"schema": {"type": "string"}}}}


def _errors(path: str) -> dict[str, Any]:
    return {status: _error(path, summary) for status, summary in _ERRORS.items()}


def _error(path: str, summary: str) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith(_OF_ANTHROPIC) else "Error"
    return {"description": summary, "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}}


_OBJECT: Final = {"type": "object"}
_TEXT: Final = {"type": "string"}
_ERROR_SCHEMAS: Final = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": _TEXT},
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
}
