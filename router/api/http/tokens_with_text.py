"""Tokens with their text: where log-probabilities are streamed, a token is sent with the beginning of its text.

Text that may become a stop string is held back, and its tokens with it: so every offset points into the text that was
sent, also where a stop string removes the text of several tokens.
"""

from holdfast.router.events import OutputDelta
from holdfast.router.text.text_stream import TextOffsets
from holdfast.worker.request import TokenLogprob


class TokensWithText:
    """Of one choice. All input comes out, in order; a delivery may come out without tokens, and its tokens with a later
    delivery.
    """

    def __init__(self, offsets: TextOffsets) -> None:
        """`offsets` must not be shared: it gets every token."""
        self._offsets = offsets
        self._held: list[tuple[int, TokenLogprob, int]] = []
        """Token, log-probability, offset."""
        self._num_told = 0
        self._num_chars = 0

    @property
    def holds(self) -> bool:
        """Whether tokens wait. Then the client cannot resume here: their log-probabilities are computed once."""
        return bool(self._held)

    def of(self, delivery: OutputDelta) -> OutputDelta | None:
        """What can be told now; None: nothing. What the client of a resumed stream has comes without log-probabilities,
        and is as it was told.
        """
        self._num_chars += len(delivery.text)
        if len(delivery.logprobs) < len(delivery.token_ids):
            for token_id in delivery.token_ids:
                self._offsets.push(token_id)
            self._num_told += len(delivery.token_ids)
            return delivery
        for token_id, said in zip(delivery.token_ids, delivery.logprobs, strict=True):
            self._held.append((token_id, said, self._offsets.push(token_id)))
        count = len(self._held) if delivery.finish_reason is not None else self._num_begun()
        told, self._held = self._held[:count], self._held[count:]
        if not (told or delivery.text or delivery.finish_reason is not None):
            return None
        first = self._num_told
        self._num_told += count
        return delivery._replace(
            first_token_index=first,
            token_ids=tuple(token_id for token_id, _, _ in told),
            logprobs=tuple(said for _, said, _ in told),
        )

    def _num_begun(self) -> int:
        """How many of the tokens that wait have text that was sent."""
        waiting = (at for at, (_, _, offset) in enumerate(self._held) if offset >= self._num_chars)
        return next(waiting, len(self._held))
