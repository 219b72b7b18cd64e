"""Text state of one sequence: the incremental detokenizer followed by the stop string matcher.

A pure function of the tokens so far: a router that resumes a request pushes them again and continues. The matcher finds
matches across pieces, and holds back only as much text as needed: its result depends on the text alone, not on its
pieces.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams


class StopStringMatcher:
    """Releases text up to the first stop string, and with `include_match` the stop string too.

    The first match is the one that ends first; of several that end at the same character, the longest. Text is held
    back only while it may be the beginning of a stop string.
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

        Without `may_match`, a stop string that ends in `text` is ignored; a stop string that begins in it may still
        match later.
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


def stop_reason(params: SamplingParams, token_ids: Sequence[int], matched: str | None) -> str | int | None:
    """The stop string or stop token that has ended an output with `FinishReason.STOP`; None for an end of sequence.
    `token_ids` are the output's last ones, and `matched` is the stop string that its text state has found.
    """
    if matched is not None:
        return matched
    last = token_ids[-1] if token_ids else None
    return last if last in params.stop_token_ids else None


def shown_tokens(
    token_ids: tuple[int, ...], finish_reason: FinishReason | None, params: SamplingParams
) -> tuple[int, ...]:
    """The last tokens of an output that are part of its text. `finish_reason` is the engine's: an output that it ends
    with `STOP` has an end of sequence or a stop token as its last token, which is no text.
    """
    is_shown = finish_reason is not FinishReason.STOP or params.include_stop_str_in_output
    return token_ids if is_shown else token_ids[:-1]


class TextPiece(NamedTuple):
    """The result of a push of tokens."""

    text: str
    """Text that is now final."""
    num_tokens: int
    """Tokens of the output: all, or the ones up to the token that completed a stop string."""
    stopped: bool
    """Whether a stop string is complete: the output has ended."""


class TextStream:
    """Text state of one sequence. The text and its end do not depend on how tokens are grouped into pushes.

    With `prompt_token_ids` the text continues the prompt: with some tokenizers it then begins with a space.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling_params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        params = sampling_params
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, context=prompt_token_ids)
        stop, include_match = params.stop_strings, params.include_stop_str_in_output
        self._matcher = StopStringMatcher(stop, include_match=include_match) if stop else None
        self._has_text = params.detokenize
        self.push_one: Callable[[int], str | None] = self._detokenizer.push_one
        """The text of the next token; None where `push` must take it, because there are stop strings."""
        if self._matcher is not None:
            self.push_one = _not_taken
        elif not self._has_text:
            self.push_one = _no_text
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._guess: _Guess | None = None

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Takes the next tokens. Those after a complete stop string are ignored."""
        if not self._has_text:
            return TextPiece("", len(token_ids), False)
        if self._matcher is None:  # then text needs no matching, nor guesses of what may be matched
            return TextPiece(self._detokenizer.push(token_ids), len(token_ids), False)
        texts: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            num_tokens += 1
            self._num_tokens += 1
            text, self._matcher = self._matched_text(token_id, self._matcher)
            texts.append(text)
        return TextPiece(text="".join(texts), num_tokens=num_tokens, stopped=self._matcher.matched is not None)

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the output; None so far."""
        return None if self._matcher is None else self._matcher.matched

    def finish(self) -> str:
        """The text that was held back, for a sequence that ended otherwise; empty after a stop string."""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        released, matcher = self._settle(text, self._matcher)
        return released + matcher.finish()

    def _matched_text(self, token_id: int, matcher: StopStringMatcher) -> tuple[str, StopStringMatcher]:
        """Text that may still change is not released, unless it contains a stop string, which ends the output."""
        text = self._detokenizer.push((token_id,))
        if not self._detokenizer.is_guessing:
            return self._settle(text, matcher)
        if self._detokenizer.guess:
            self._guess = self._guess or _Guess(copy(matcher))
            self._guess.push(self._detokenizer.guess, may_match=self._may_match)
            if self._guess.matcher.matched is not None:
                return self._settle("".join(self._guess.seen), matcher)
        return "", matcher

    def _settle(self, text: str, matcher: StopStringMatcher) -> tuple[str, StopStringMatcher]:
        """Matches text that is now final. If it begins with the guessed text, the guess's matcher state goes on."""
        guess, self._guess = self._guess, None
        if guess is None or not text.startswith(seen := "".join(guess.seen)):
            return matcher.push(text, may_match=self._may_match), matcher
        matcher, rest = guess.matcher, text[len(seen) :]
        return "".join(guess.released) + matcher.push(rest, may_match=self._may_match), matcher

    @property
    def _may_match(self) -> bool:
        """Like an end-of-sequence token, the token that completes a stop string must come after `min_tokens` tokens."""
        return self._num_tokens > self._min_tokens


def _not_taken(token_id: int) -> None:
    return None


def _no_text(token_id: int) -> str:
    return ""


class _Guess:
    """Text of a byte run that may still change, and a copy of the matcher that has seen it."""

    def __init__(self, matcher: StopStringMatcher) -> None:
        self.matcher = matcher
        self.seen: list[str] = []
        self.released: list[str] = []

    def push(self, text: str, *, may_match: bool) -> None:
        self.seen.append(text)
        self.released.append(self.matcher.push(text, may_match=may_match))
