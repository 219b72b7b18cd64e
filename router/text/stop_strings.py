"""Stop string matcher for streamed text: finds matches across pieces, and holds back no more text than needed.

The result depends on the text alone, not on how it is split into pieces.
"""

from collections.abc import Sequence

from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams


class StopStringMatcher:
    """Releases text up to the first stop string, and with `include_match` the stop string too.

    The first is the one that ends first; of several that end at the same character, the longest. Text is held back only
    while it may be the beginning of a stop string.
    """

    def __init__(self, stop: Sequence[str], *, include_match: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_match = include_match
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; None so far."""
        return self._matched

    def push(self, text: str, *, may_match: bool = True) -> str:
        """The text that is now certain to be part of the output; empty after a match.

        Without `may_match`, a stop string that ends in `text` is ignored; one that begins in it may still match later.
        """
        if not self._stop:
            return text
        if self._matched is not None:
            return ""
        num_old = len(self._held)
        text = self._held + text
        end, length = self._first_match(text, num_old) if may_match else (0, 0)
        if length:
            self._matched, self._held = text[end - length : end], ""
            return text[: end if self._include_match else end - length]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        released = text[: len(text) - num_held]
        self._held = text[len(released) :]
        return released

    def finish(self) -> str:
        """The text that was held back for a stop string that did not complete."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_old: int) -> tuple[int, int]:
        """End and length of the first match that ends beyond `num_old` characters; length 0 without one."""
        found = ((text.find(stop, max(0, num_old + 1 - len(stop))), len(stop)) for stop in self._stop)
        ends = ((start + length, -length) for start, length in found if start >= 0)
        end, negative_length = min(ends, default=(0, 0))
        return end, -negative_length


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def stop_reason(
    params: SamplingParams, finish_reason: FinishReason | None, token_ids: Sequence[int], matched: str | None
) -> str | int | None:
    """`token_ids` are the last ones of the output, and `matched` is the stop string that its text state has found.

    None where the model's own end or a limit has ended it.
    """
    if finish_reason is not FinishReason.STOP:
        return None
    if matched is not None:
        return matched
    last = token_ids[-1] if token_ids else None
    return last if last in params.stop_token_ids else None


def shown_tokens(
    token_ids: tuple[int, ...], finish_reason: FinishReason | None, params: SamplingParams
) -> tuple[int, ...]:
    """Those of the last tokens of an output that its text is of. `finish_reason` is the engine's: an output that it
    ends with `STOP` has an end of sequence or a stop token as its last token, which is no text.
    """
    is_shown = finish_reason is not FinishReason.STOP or params.include_stop_str_in_output
    return token_ids if is_shown else token_ids[:-1]
