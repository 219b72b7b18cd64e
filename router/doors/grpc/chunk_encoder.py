"""Chunk encoder: the deliveries of one stream as bytes of `GenerateStreamResponse` messages.

Most deliveries bring tokens and text alone. Of those, what all chunks of a stream share is written once, and put behind
what is new: protobuf messages are merged by joining their bytes. A single token is written field by field, by the
encoding of the wire, which takes a fifth of what a message takes. What may not live here: which fields a client gets
(`router/doors/public_answer.py`), messages field by field (`router/wire/response_codec.py`).
"""

from dataclasses import replace
from typing import Final

from holdfast.router.doors.chat_answer import ChatDeltas
from holdfast.router.doors.public_answer import public_chunk
from holdfast.router.events import Deliver
from holdfast.router.wire.response_codec import chunk_message
from holdfast.v1.inference_pb2 import GenerateStreamResponse

_INDEX, _TOKEN, _TEXT = (
    bytes([GenerateStreamResponse.DESCRIPTOR.fields_by_name[name].number << 3 | kind])
    for name, kind in (("first_token_index", 0), ("token_ids", 2), ("text", 2))
)
"""What is before each field's content: its number, and 0 for a number, 2 for a length and as many bytes."""


def varint(number: int) -> bytes:
    """Seven bits to a byte, the lowest first; all bytes but the last have the highest bit set."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


_VARINTS: Final = tuple(map(varint, range(2**14)))
"""Those of one byte or two, as nearly all indices and lengths are."""


class ChunkEncoder:
    """Of one stream. `chat_deltas` say what its text does."""

    __slots__ = ("_chat_deltas", "_shared")

    def __init__(self, chat_deltas: ChatDeltas | None = None) -> None:
        self._chat_deltas = chat_deltas
        self._shared: dict[tuple[int, str, bool], bytes] = {}
        """By sequence, fingerprint and guarantee: one for each sequence, and more where another replica goes on."""

    def encode(self, delivery: Deliver) -> bytes:
        if self._chat_deltas is not None:
            chunk = replace(public_chunk(delivery), chat=self._chat_deltas.of(delivery))
            return chunk_message(chunk).SerializeToString()
        _, first, token_ids, text, finish_reason, usage, logprobs, of_prompt, number, _, origin, is_sure, _, _ = (
            delivery
        )
        if finish_reason is not None or usage is not None or logprobs or of_prompt:
            return chunk_message(public_chunk(delivery)).SerializeToString()
        shared = self._shared.get((number, origin, is_sure))
        if shared is None:
            shared = self._shared[number, origin, is_sure] = _shared(delivery)
        try:
            (token_id,) = token_ids
            token, said = _VARINTS[token_id] if token_id < 2**14 else varint(token_id), text.encode()
            told = b"%b%b%b%b%b" % (_INDEX, _VARINTS[first], _TOKEN, _VARINTS[len(token)], token)
            return b"%b%b%b%b%b" % (told, _TEXT, _VARINTS[len(said)], said, shared)
        except (ValueError, IndexError):  # several tokens, or a number of more bytes
            new = GenerateStreamResponse(first_token_index=first, token_ids=token_ids, text=text)
            return new.SerializeToString() + shared


def _shared(delivery: Deliver) -> bytes:
    """All that a chunk says besides its tokens and text."""
    message = chunk_message(public_chunk(delivery))
    for name in ("first_token_index", "token_ids", "text"):
        message.ClearField(name)
    return message.SerializeToString()
