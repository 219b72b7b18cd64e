"""What a client receives of a stream, piece by piece and in all: enough to go on elsewhere when the router is lost.

Plain data. What may not live here: gRPC (`client.py`, `client_wire.py`), time (`patience.py`).
"""

from dataclasses import dataclass, field, replace

from worker.errors import InternalError
from worker.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is new of one sequence. Its chunks continue each other without gap or overlap."""

    request_id: str
    sequence_index: int = 0
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """Set on the last chunk of a sequence."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    replayed_without_guarantee: bool = False
    """The request was carried on where equal tokens are not certain: nothing is missing, but another run may differ."""
    system_fingerprint: str = ""
    """Names all that the tokens are a function of, the request aside."""


@dataclass(slots=True)
class ReceivedSequence:
    """What has arrived of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    is_finished: bool = False


class Received:
    """What has arrived of one stream, whichever routers it came from."""

    def __init__(self) -> None:
        self.sequences: list[ReceivedSequence] = []
        """By sequence index."""
        self.fingerprint = ""
        self._replayed_without_guarantee = False

    def take(self, chunk: Chunk) -> Chunk | None:
        """Notes a chunk, and returns it with what is known from earlier ones; None if its sequence was over before.

        Raises `InternalError` for a gap or an overlap.
        """
        while len(self.sequences) <= chunk.sequence_index:
            self.sequences.append(ReceivedSequence())
        sequence = self.sequences[chunk.sequence_index]
        if sequence.is_finished:
            return None
        if chunk.first_token_index != len(sequence.token_ids):
            place = f"at token {chunk.first_token_index}, not {len(sequence.token_ids)}"
            raise InternalError(f"sequence {chunk.sequence_index} does not go on where it was cut off: {place}")
        sequence.token_ids += chunk.token_ids
        sequence.text_length += len(chunk.text)
        sequence.is_finished = chunk.finish_reason is not None
        self.fingerprint = chunk.system_fingerprint
        self._replayed_without_guarantee |= chunk.replayed_without_guarantee
        return replace(chunk, replayed_without_guarantee=self._replayed_without_guarantee)
