"""Messages and bodies that are as large in one field as its bounds allow, generated from the schemas of every API.

They pass the scan, and cost what comes after it: parsing, conversion, checks, tokenization.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from benchmarks.router_parts.hostile_fields import BODIES, REQUESTS, Hostile, paths, varint
from holdfast.foreign import grpc_service_pb2, vllm_engine_pb2
from holdfast.router.api.http.request_reader import body_bounds
from holdfast.router.config import LimitsConfig
from holdfast.router.wire.bounds import public_bounds
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import PARAMETERS
from holdfast.worker.wire.message_bounds import MalformedMessageError, MessageBounds

Filling = Callable[[int], bytes]
"""A field's bytes that take about as many."""

_LENGTH: Final = 2
_FIRST: Final = 2**12
"""The first size that is tried; others are found by doubling, and then by halves."""
_NEAR: Final = 30
_SMALL: Final = 2**16
"""Of a field that holds less, one kind of content is tried."""

_TEXTS: Final[Mapping[str, bytes]] = {
    "a letter": b"a",
    "words": b"word ",
    "letters of all kinds": bytes(range(33, 127)).replace(b'"', b"").replace(b"\\", b""),
}
_ELEMENTS: Final[Mapping[str, bytes]] = {"numbers": b"1", "lists": b"[]", "objects": b'{"a":1}', "texts": b'"a"'}

_CHAT: Final = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x")])
_TENSOR: Final = grpc_service_pb2.ModelInferRequest.InferInputTensor
_BASES: Final[Mapping[str, Message]] = {
    "holdfast.v1.GenerateRequest": inference_pb2.GenerateRequest(
        text="x", sampling_params=inference_pb2.SamplingParams(max_tokens=1)
    ),
    "vllm.grpc.engine.GenerateRequest": vllm_engine_pb2.GenerateRequest(
        text="x", request_id="r", sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=1)
    ),
}
_INSIDE: Final[Mapping[str, Message]] = {
    "holdfast.v1.Chat": _CHAT,
    "holdfast.v1.ChatMessage": inference_pb2.ChatMessage(role="user", content="x"),
    "holdfast.v1.Tool": inference_pb2.Tool(name="f"),
    "holdfast.v1.ToolCall": inference_pb2.ToolCall(id="c", name="f"),
    "inference.ModelInferRequest.InferInputTensor": _TENSOR(name="text_input", datatype="BYTES", shape=[1]),
}
"""What a message needs beside the field that is filled, for the request to be read further."""


def large_messages(limits: LimitsConfig, wanted: Callable[[str], bool]) -> Iterator[Hostile]:
    """For each field of each request of each service, with each kind of content, if its API and name are wanted."""
    bounds, filled = public_bounds(limits), set[str]()
    for name, message in REQUESTS.items():
        check = MessageBounds.of(message, bounds).check
        for path, wraps in paths(message):
            if wraps[-1].full_name in filled:
                continue
            filled.add(wraps[-1].full_name)
            if not wanted(f"{name} {path}"):
                continue
            for kind, filling in _fillings(wraps[-1]):
                data = largest(partial(_message, name, wraps, filling), check, limits.max_message_bytes)
                yield Hostile(name, f"{path}: {kind}", data)
                if len(data) < _SMALL:
                    break


def _message(name: str, wraps: tuple[Any, ...], filling: Filling, size: int) -> bytes:
    whole = filling(size)
    for field in reversed(wraps[:-1]):
        inside = _INSIDE.get(field.message_type.full_name)
        whole = (b"" if inside is None else inside.SerializeToString()) + whole
        whole = varint(field.number << 3 | _LENGTH) + varint(len(whole)) + whole
    base = _BASES.get(name)
    return (b"" if base is None else base.SerializeToString()) + whole


def largest(made: Filling, check: Callable[[bytes], object], most: int) -> bytes:
    """What is made for the largest size that passes, of at most `most` bytes, within a thirtieth."""
    passing, found, size = 0, made(0), _FIRST
    while len(data := made(size)) <= most and _passes(check, data):
        passing, found, size = size, data, 2 * size
    refused = size
    while refused - passing > refused // _NEAR:
        data = made((passing + refused) // 2)
        if len(data) <= most and _passes(check, data):
            passing, found = (passing + refused) // 2, data
        else:
            refused = (passing + refused) // 2
    return found


def _passes(check: Callable[[bytes], object], data: bytes) -> bool:
    try:
        check(data)
    except (InvalidRequestError, MalformedMessageError):
        return False
    return True


def _fillings(field: Any) -> Iterator[tuple[str, Filling]]:
    tag = field.number << 3
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        yield "entries", partial(_entries, field)
    elif inner is not None:
        inside = _INSIDE.get(inner.full_name)
        part = b"" if inside is None else inside.SerializeToString()
        yield "messages", partial(_repeated, varint(tag | _LENGTH) + varint(len(part)) + part)
    elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        for kind, text in texts().items():
            yield f"one text of {kind}", partial(_one_text, tag, text)
        if field.is_repeated:
            yield "texts", partial(_repeated, varint(tag | _LENGTH) + b"\1a")
    elif field.is_repeated:
        yield "packed", partial(_one_text, tag, _zeros)


def texts() -> dict[str, Filling]:
    """Texts of about so many bytes, by what they are made of."""
    plain: dict[str, Filling] = {kind: partial(_repeated, part) for kind, part in _TEXTS.items()}
    plain |= {f"JSON of {kind}": partial(_object_text, part) for kind, part in _ELEMENTS.items()}
    return plain


def _zeros(size: int) -> bytes:
    return bytes(size // 8 * 8)


def _one_text(tag: int, text: Filling, size: int) -> bytes:
    return _text(tag, text(size))


def _object_text(element: bytes, size: int) -> bytes:
    return b'{"a":[%b]}' % _json_list(element, size - 8)


def _json_list(element: bytes, size: int) -> bytes:
    return (element + b",") * (max(0, size) // (len(element) + 1)) + element


def _text(tag: int, text: bytes) -> bytes:
    return varint(tag | _LENGTH) + varint(len(text)) + text


def _repeated(part: bytes, size: int) -> bytes:
    return part * (max(0, size) // len(part))


def _entries(field: Any, size: int) -> bytes:
    """With different keys."""
    key, _ = field.message_type.fields
    found, number = bytearray(), 0
    while len(found) < size:
        name = varint(8) + varint(number) if key.type != FieldDescriptor.TYPE_STRING else _text(8, b"%d" % number)
        found += _text(field.number << 3, name)
        number += 1
    return bytes(found)


# --- bodies ---

_PROMPTS: Final = {"/v1/completions": ("prompt", "x"), "/tokenize": ("prompt", "x"), "/detokenize": ("tokens", [1])}
_MESSAGES: Final = [{"role": "user", "content": "x"}]
_TOOL: Final = b'{"type":"function","name":"f","function":{"name":"f"},"input_schema":{}}'


def large_bodies(limits: LimitsConfig, wanted: Callable[[str], bool]) -> Iterator[Hostile]:
    """The same of each field of each body, and one that nobody has declared. Small ones are tried in one body."""
    bounds, small = body_bounds(limits), set[str]()
    for path, body in BODIES.items():
        for name in sorted({*body.model_fields, *PARAMETERS, "nobodys"} - small):
            if bounds.fields.get(name, bounds.other) == bounds.other:
                small.add(name)
            if not wanted(f"{path} {name}"):
                continue
            for kind, value in _values(name).items():
                check = partial(bounds.check, apart=body.lists_of_ids)
                data = largest(partial(_body, path, name, value), check, limits.max_message_bytes)
                yield Hostile(path, f"{name}: {kind}", data)
                if len(data) < _SMALL:
                    break


def _body(path: str, name: str, value: Filling, size: int) -> bytes:
    base: dict[str, Any] = {"max_tokens": 1}
    if path in _PROMPTS:
        base |= dict([_PROMPTS[path]])
    else:
        base |= {"input": "x"} if path == "/v1/responses" else {"messages": _MESSAGES}
    base.pop(name, None)
    return b'%b,"%b":%b}' % (json.dumps(base).encode()[:-1], name.encode(), value(size))


def _values(name: str) -> dict[str, Filling]:
    made: dict[str, Filling] = {"object": _object}
    made |= {f"one text of {kind}": partial(_quoted, text) for kind, text in texts().items() if "JSON" not in kind}
    made |= {f"list of {kind}": partial(_listed, part) for kind, part in _ELEMENTS.items()}
    turn = json.dumps(_MESSAGES[0]).encode()
    if name in ("messages", "input"):
        made |= {"turns": partial(_listed, turn), "one turn": partial(_one_turn, turn)}
    if name == "tools":
        made["functions"] = partial(_listed, _TOOL)
    return made


def _one_turn(turn: bytes, size: int) -> bytes:
    return b'[%b%b"}]' % (turn.removesuffix(b'"}'), b"word " * (size // 5))


def _quoted(text: Filling, size: int) -> bytes:
    return b'"%b"' % text(size)


def _listed(element: bytes, size: int) -> bytes:
    return b"[%b]" % _json_list(element, size)


def _object(size: int) -> bytes:
    return b"{%b}" % b",".join([b'"%d":1' % number for number in range(size // 9)])
