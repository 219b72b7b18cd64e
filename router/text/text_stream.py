"""Text state of one sequence: the incremental detokenizer followed by the stop string matcher.

A pure function of the tokens so far: a router that resumes a request pushes them again and continues. What may not live
here: IO, and other reasons to end a sequence.
"""

import codecs
from collections.abc import Callable, Sequence
from copy import copy
from typing import Final, NamedTuple

from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.stop_strings import StopStringMatcher
from holdfast.router.text.token_table import REPLACEMENT, is_nothing
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


_MAX_CONTEXT: Final = 6


class TextOffsets:
    """Of one sequence, whose text goes on after that of `prompt_token_ids`. The offsets do not depend on how tokens
    are cut into deliveries.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        *,
        start: int = 0,
        text: str = "",
    ) -> None:
        """`start`: the offset of the first token. `text` is the whole one where it is known, as of a prompt: special
        tokens that it writes out have a length.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if params.skip_special_tokens else frozenset[int]()
        self._has_text = params.detokenize
        self._text = text
        self._at = start
        """Characters before the last run of byte tokens, and before what is not a whole character yet."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = _Run()
        self._context: list[int] | None = None
        """What stands before the first token; None behind that."""
        self._start_after(prompt_token_ids)

    def push(self, token_id: int) -> int:
        """The offset of the next token."""
        if not self._is_shown(token_id):
            return self._pass_by(token_id)
        data = self._new_bytes(token_id)
        if token_id in self._tokenizer.fallback_bytes:
            at = self._at + self._run.num_chars
            self._run.push(self._tokenizer.tokens.bytes_of(token_id), is_dropped=not data)
            return at
        if self._run.num_bytes:
            if not data and is_nothing(self._tokenizer, self._tokenizer.fallback_bytes, token_id):
                return self._at + self._run.num_chars
            self._at += self._run.final_num_chars
            self._run = _Run()
        at = self._at + self._ends_character(data)
        self._at += len(self._utf8.decode(data))
        return at

    def _is_shown(self, token_id: int) -> bool:
        return self._has_text and token_id not in self._skipped and token_id < self._tokenizer.vocab_size

    def _pass_by(self, token_id: int) -> int:
        """The offset of a token that is not shown: unless the text that is known says otherwise, it has no length."""
        at = self._at + self._run.num_chars
        written = self._tokenizer.tokens.text_of(token_id)
        if written and self._text.startswith(written, at):
            self._at += len(written)
        return at

    def _new_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; the first has what its decoder writes at the beginning of a text, such as no space."""
        data, context = self._tokenizer.tokens.bytes_of(token_id), self._context
        if context is None:
            return data
        self._context = None
        before = self._tokenizer.decode_known(context)
        shown = self._tokenizer.decode_known([*context, token_id])[len(before) :]
        return data if REPLACEMENT in shown or self._utf8.getstate()[0] or not before.isascii() else shown.encode()

    def _ends_character(self, data: bytes) -> bool:
        """Whether bytes that were waiting for the rest of their character do not get it from `data`."""
        waiting, _ = self._utf8.getstate()
        if not waiting or not data:
            return False
        strict = codecs.getincrementaldecoder("utf-8")()
        try:
            strict.decode(waiting + data[:1])
        except UnicodeDecodeError:
            return True
        return False

    def _start_after(self, prompt: Sequence[int]) -> None:
        """What the prompt ends with may be part of the output's first character, as `IncrementalDetokenizer` has it."""
        first, fallback = len(prompt), self._tokenizer.fallback_bytes
        while fallback and first > 0 and self._may_be_in_run(prompt[first - 1]):
            first -= 1
        context = [token_id for token_id in prompt[:first][-_MAX_CONTEXT:] if self._is_shown(token_id)]
        while self._tokenizer.decode_known(context).startswith(REPLACEMENT):
            context = context[1:]
        text = self._utf8.decode(b"".join(map(self._tokenizer.tokens.bytes_of, context)))
        self._at += len(text) - len(text.rstrip(REPLACEMENT))
        run = [token_id for token_id in prompt[first:] if token_id in fallback]
        for token_id in run:
            self._run.push(bytes((fallback[token_id],)))
        self._run.give()
        self._context = context + run

    def _may_be_in_run(self, token_id: int) -> bool:
        fallback = self._tokenizer.fallback_bytes
        return token_id in fallback or not self._is_shown(token_id) or is_nothing(self._tokenizer, fallback, token_id)


class _Run:
    """A run of byte-fallback tokens: valid as a whole, or each of its bytes is one U+FFFD."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_whole = 0
        self._given_bytes = self._given_chars = 0
        self._num_dropped = 0
        """Spaces at the beginning of a text that its decoder drops, unless the run is broken."""
        self._is_broken = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    @property
    def num_chars(self) -> int:
        """Those so far that are whole, without the prompt's."""
        return self.num_bytes - self._given_bytes if self._is_broken else self._num_shown

    @property
    def _num_shown(self) -> int:
        return self._num_whole - self._given_chars - self._num_dropped

    @property
    def final_num_chars(self) -> int:
        """Those of the run if it ends here."""
        return self.num_bytes - self._given_bytes if self._utf8.getstate()[0] else self.num_chars

    def give(self) -> None:
        """What has come belongs to the prompt, unless it ends within a character."""
        if self._is_broken or not self._utf8.getstate()[0]:
            self._given_bytes, self._given_chars = self.num_bytes, self._num_whole

    def push(self, data: bytes, *, is_dropped: bool = False) -> None:
        self.num_bytes += len(data)
        self._num_dropped += is_dropped
        try:
            self._num_whole += len(self._utf8.decode(data))
        except UnicodeDecodeError:
            self._is_broken = True
