"""Text state of one sequence: the incremental detokenizer followed by the stop string matcher.

A pure function of the tokens so far: a router that resumes a request pushes them again and continues. What may not live
here: IO, and other reasons to end a sequence.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.stop_strings import StopStringMatcher
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.sampling_params import SamplingParams


class TextPiece(NamedTuple):
    """The result of a push of tokens."""

    text: str
    """Text that is now final."""
    num_tokens: int
    """How many of the tokens are part of the output: all, or those up to the one that completed a stop string."""
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
        self._matcher = StopStringMatcher(params.stop_strings, include_match=params.include_stop_str_in_output)
        self._has_stop_strings = bool(params.stop_strings)
        self._has_text = params.detokenize
        self.push_one: Callable[[int], str | None] = self._short_way(params)
        """The text of the next token; None where `push` must take it, because there are stop strings."""
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._guess: _Guess | None = None

    def _short_way(self, params: SamplingParams) -> Callable[[int], str | None]:
        if params.stop_strings:
            return _not_taken
        return self._detokenizer.push_one if params.detokenize else _no_text

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Takes the next tokens. Those after a complete stop string are ignored."""
        if not self._has_text:
            return TextPiece("", len(token_ids), False)
        if not self._has_stop_strings:  # then text needs no matching, nor guesses of what may be matched
            return TextPiece(self._detokenizer.push(token_ids), len(token_ids), False)
        texts: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            num_tokens += 1
            self._num_tokens += 1
            texts.append(self._push_one(token_id))
        return TextPiece(text="".join(texts), num_tokens=num_tokens, stopped=self._matcher.matched is not None)

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the output; None so far."""
        return self._matcher.matched

    def finish(self) -> str:
        """The text that was held back, for a sequence that ended otherwise; empty after a stop string."""
        return self._settle(self._detokenizer.finish()) + self._matcher.finish()

    def _push_one(self, token_id: int) -> str:
        """Text that may still change is not released, unless it contains a stop string, which ends the output."""
        text = self._detokenizer.push((token_id,))
        if not self._detokenizer.is_guessing:
            return self._settle(text)
        if self._detokenizer.guess:
            self._guess = self._guess or _Guess(copy(self._matcher))
            self._guess.push(self._detokenizer.guess, may_match=self._may_match)
            if self._guess.matcher.matched is not None:
                return self._settle("".join(self._guess.seen))
        return ""

    def _settle(self, text: str) -> str:
        """Matches text that is now final. If it begins with the guessed text, the guess's matcher state is reused."""
        guess, self._guess = self._guess, None
        if guess is None or not text.startswith(seen := "".join(guess.seen)):
            return self._match(text)
        self._matcher = guess.matcher
        return "".join(guess.released) + self._match(text[len(seen) :])

    def _match(self, text: str) -> str:
        """The part of the last token's text that the matcher releases. Like an end-of-sequence token, the token that
        completes a stop string must come after the first `min_tokens` tokens.
        """
        return self._matcher.push(text, may_match=self._may_match)

    @property
    def _may_match(self) -> bool:
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
