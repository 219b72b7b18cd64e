"""Record of what a client has received of a stream: enough to resume it at another router.

Plain data. What may not live here: calls (`async_client.py`) and time (`retry_policy.py`).
"""

from dataclasses import dataclass, field, replace

from holdfast.router.generation import Chunk
from holdfast.router.resume import Progress, Resume
from holdfast.worker.errors import InternalError
from holdfast.worker.request import FinishReason


@dataclass(slots=True)
class ReceivedSequence:
    """What has arrived of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    finish_reason: FinishReason | None = None
    """Set once its end has come."""


class Received:
    """What has arrived of one stream, whichever routers it came from."""

    def __init__(self) -> None:
        self.sequences: list[ReceivedSequence] = []
        """By sequence index."""
        self.fingerprint = ""
        self.is_over = False
        """The very last chunk has come, which says the usage: all that may be missing is the end of the call."""
        self._replayed_without_guarantee = False

    @property
    def resume(self) -> Resume:
        """For the router that is to go on with it."""
        sequences = tuple(
            Progress(
                token_ids=tuple(sequence.token_ids),
                text_length=sequence.text_length,
                finish_reason=sequence.finish_reason,
            )
            for sequence in self.sequences
        )
        return Resume(sequences=sequences, fingerprint=self.fingerprint)

    def take(self, chunk: Chunk) -> Chunk | None:
        """Notes a chunk, and returns it with what is known from earlier ones; None if its sequence was over before.

        Raises `InternalError` for a gap or an overlap.
        """
        while len(self.sequences) <= chunk.sequence_index:
            self.sequences.append(ReceivedSequence())
        if chunk.usage is not None:
            self.is_over = True
        sequence = self.sequences[chunk.sequence_index]
        if sequence.finish_reason is not None:
            return None
        if chunk.first_token_index != len(sequence.token_ids):
            place = f"at token {chunk.first_token_index}, not {len(sequence.token_ids)}"
            raise InternalError(f"sequence {chunk.sequence_index} does not go on where it was cut off: {place}")
        sequence.token_ids += chunk.token_ids
        sequence.text_length += len(chunk.text)
        sequence.finish_reason = chunk.finish_reason
        self.fingerprint = chunk.system_fingerprint
        if chunk.replayed_without_guarantee == self._replayed_without_guarantee:
            return chunk
        self._replayed_without_guarantee = True
        return replace(chunk, replayed_without_guarantee=True)
