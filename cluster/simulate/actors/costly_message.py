"""Costs of messages: how long the event loops of simulated routers and replicas are busy with one, and the bytes of
`GenerateRequest`s that cost their router much, or end it.

The real scan reads the bytes, within the real bounds, and its reads are counted, so a missing bound shows in a
message's cost. Parsers are not run.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from holdfast.router.events import SendAbort, SendSubmit
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.poison_watch import lasting_parts, request_digest
from holdfast.router.wire.request_codec import generation_request_message
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.wire.message_bounds import MessageBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCosts:
    """Seconds."""

    call_s: float = 3e-4
    """Cost of each call at a router: reading headers, admission, its answer."""
    read_s: float = 2e-7
    """Cost of each byte that the scan of a message looks at, each time."""
    parse_byte_s: float = 8e-9
    """Cost of each byte that is parsed."""
    delta_s: float = 2e-5
    """Cost of each delta of a step update, at a router that reads it and at a replica that writes it."""
    reset_s: float = 3e-4
    """Cost of each stream that is opened and reset at once: 2,383 of them took 0.7 s of a loop."""
    hand_off_s: float = 1e-3
    """Cost of handing a message to a thread and taking the result."""
    switch_s: float = 5e-3
    """Until another thread in Python gives the interpreter's lock to a loop that asks for it."""
    submit_s: float = 1e-4
    """Cost of each request that a replica is sent; an abort costs a tenth."""

    def of_update(self, update: StepUpdate) -> float:
        """Cost of a step update at either end of a link."""
        return self.delta_s * (len(update.deltas) + len(update.plain.attempts))

    def at_replica(self, message: Any) -> float:
        """Cost of a router's message to a replica's loop."""
        match message:
            case SendSubmit():
                return self.submit_s
            case SendAbort():
                return self.submit_s / 10
        return 0.0


FREE: Final = LoopCosts(
    call_s=0.0, read_s=0.0, parse_byte_s=0.0, delta_s=0.0, reset_s=0.0, hand_off_s=0.0, switch_s=0.0, submit_s=0.0
)
"""Costs of processes whose event loops are never busy."""


KIND: Final = "holdfast.v1.Inference.GenerateStream"
BUILT_BYTES: Final = 200
"""Bytes of memory for each entry of a map or list, in the parsed message and in the objects made from it."""


class End(StrEnum):
    """End of a router that reads a message."""

    CRASH = "crash"
    HANG = "hang"
    NO_MEMORY = "no memory"


class _CountedBytes(bytes):
    """Bytes that count how often a scan looks at them."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return bytes.__getitem__(self, index)


@dataclass(frozen=True, kw_only=True, eq=False)
class CostlyMessage:
    """The bytes of one request, and their content."""

    data: bytes
    num_entries: int = 0
    """Entries of maps and lists."""
    convert_entry_s: float = 0.0
    """Seconds to convert an entry in Python once it is parsed."""
    compile_s: float = 0.0
    """Seconds of a thread for its grammar."""
    end: End | None = None
    """End of the router that reads the message."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", request_digest(KIND, *lasting_parts(self.data)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Costs of decoding one message in an interpreter."""

    shared_s: float
    """Seconds in Python: other threads take turns."""
    held_s: float
    """Seconds in a parser, which holds the interpreter's lock to its end."""
    built_bytes: int
    """Bytes of memory beside the message itself."""
    error: InvalidRequestError | None


class Decoder:
    """The real scan, and estimates of the later stages. Each message is scanned once for all routers."""

    def __init__(self, bounds: MessageBounds, costs: LoopCosts) -> None:
        self._bounds = bounds
        self._costs = costs
        self._known: dict[CostlyMessage, Decoding] = {}

    def decoding(self, message: CostlyMessage) -> Decoding:
        """Seconds and bytes that decoding the message costs, computed once per message."""
        if message not in self._known:
            self._known[message] = self._decoding(message)
        return self._known[message]

    def _decoding(self, message: CostlyMessage) -> Decoding:
        costs, data, error = self._costs, _CountedBytes(message.data), None
        try:
            self._bounds.check(data)
        except InvalidRequestError as refusal:
            error = refusal
        scan_s, num_entries = data.num_reads * costs.read_s, 0 if error is not None else message.num_entries
        parsed_bytes = 0 if error is not None else len(message.data)
        return Decoding(
            shared_s=scan_s + num_entries * message.convert_entry_s,
            held_s=parsed_bytes * costs.parse_byte_s,
            built_bytes=num_entries * BUILT_BYTES,
            error=error,
        )


BIAS_ENTRY_S: Final = 3e-6
"""Seconds for an entry of `logit_bias`, or a token id, on an AVX2 core."""
TOKEN_ID_S: Final = 1e-7
BIAS_BYTES: Final = 11
"""Bytes of an entry of `logit_bias` as the simulator sends it."""


def with_logit_bias(num_bytes: int) -> CostlyMessage:
    """A message with the number of entries that fit in `num_bytes`."""
    message = generation_request_message(
        GenerationRequest(prompt="x", sampling_params=SamplingParams(logit_bias={2**20: 1.0}))
    )
    params = message.sampling_params
    (field_number,) = (one.number for one in params.DESCRIPTOR.fields if one.name == "logit_bias")
    # A key of three bytes and a float: `{2**20: 1.0}`.
    entry = bytes((field_number << 3 & 0x7F | 0x02,)) if field_number < 16 else _varint(field_number << 3 | 2)
    entry += b"\x09\x08\x80\x80\x40\x15\x00\x00\x80\x3f"
    num_entries = num_bytes // len(entry)
    return CostlyMessage(
        data=_inside(message, "sampling_params", entry * num_entries),
        num_entries=num_entries,
        convert_entry_s=BIAS_ENTRY_S,
    )


def with_token_ids(num_bytes: int, token_id: int = 1) -> CostlyMessage:
    """A prompt that repeats one token id up to this number of bytes."""
    message = generation_request_message(GenerationRequest(prompt=(1,)))
    one = _varint(token_id)
    num_ids = num_bytes // len(one)
    content = _varint(1 << 3 | 2) + _varint(num_ids * len(one)) + one * num_ids
    data = _inside(message, "token_ids", content)
    return CostlyMessage(data=data, num_entries=num_ids, convert_entry_s=TOKEN_ID_S)


def with_text(num_bytes: int, end: End | None = None, compile_s: float = 0.0) -> CostlyMessage:
    """A prompt of this number of bytes."""
    message = generation_request_message(GenerationRequest(prompt="x" * num_bytes))
    return CostlyMessage(data=message.SerializeToString(), end=end, compile_s=compile_s)


def _inside(message: Any, name: str, content: bytes) -> bytes:
    number = message.DESCRIPTOR.fields_by_name[name].number
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
