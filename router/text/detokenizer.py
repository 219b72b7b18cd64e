"""Token ids to text while they arrive: what is handed out never changes, and never ends within a character.

Tokens do not decode one by one: a character may be spread over several of them, and some decoders drop the space in
front of the first. So a short window is decoded again with each token, led by tokens whose text is out already:

    window:  [ context: its text is out | pending: its text is not out, or not all of it ]

A run of byte tokens is decoded as a whole (`byte_runs.py`), so it stays out of the window until it is over.
"""

from collections.abc import Sequence
from typing import Final

from holdfast.router.text.byte_runs import REPLACEMENT, ByteRun, is_nothing
from holdfast.router.text.tokenizer import Tokenizer

_MAX_CONTEXT: Final = 6
_MAX_WINDOW: Final = 24
"""Far more tokens than a character can have: they are bytes that will never make one."""

_MAX_CHARACTER: Final = 4
"""Bytes of a character, and so the most tokens it can be spread over."""


class IncrementalDetokenizer:
    """Text of one sequence: what `push` returns, and `finish` in the end, adds up to the text of all tokens.

    That is `tokenizer.decode` of `context` and all tokens, less the text of `context`: the end of the prompt, on which
    it depends whether the output begins with a space. One case differs: a prompt that ends in a run of byte tokens
    keeps its own text, even if the output's bytes break the run.

    A token costs the decoding of a window, at most of two, however long the sequence is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._num_context = 0
        self._num_out = 0
        """Characters of the window's text that are out."""
        self._bytes = tokenizer.fallback_bytes
        self._run = ByteRun()
        self._num_given = 0
        """Tokens of the run that are the prompt's, with whole characters."""
        self._has_guessed = False
        self.guess = ""
        """What the last token adds to the text of the run that it is in, if that does not break."""
        self._start_after(context)

    @property
    def is_guessing(self) -> bool:
        """The tokens end in a run that may still break."""
        return bool(self._run.token_ids) and not self._run.is_broken

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain."""
        self.guess = ""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def finish(self) -> str:
        """What was held back. Bytes that still wait for the rest of their character become U+FFFD."""
        self._end_run()
        rest = self._decode(self._window)[self._num_out :]
        self._window, self._num_context, self._num_out = [], 0, 0
        return rest

    def _push_one(self, token_id: int) -> str:
        if (byte := self._bytes.get(token_id)) is not None:
            return self._push_byte(token_id, byte)
        if self._run.token_ids:
            if is_nothing(self._tokenizer, self._bytes, token_id):
                return ""
            self._end_run()
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        delta = certain[self._num_out :]
        if delta and len(certain) == len(text):
            self._make_context(self._window[self._num_context :])
            return delta
        self._num_out += len(delta)
        return delta if len(self._window) <= _MAX_WINDOW else delta + self._shorten(text)

    def _push_byte(self, token_id: int, byte: int) -> str:
        if self._run.is_broken:
            return REPLACEMENT
        self.guess = self._run.push(token_id, byte)
        if self._run.is_broken:
            rest = self._decode(self._window)[self._num_out :]
            self._make_context([token_id])
            return rest + (len(self._run.token_ids) - self._num_given) * REPLACEMENT
        if self.guess and not self._has_guessed and not self._num_given:
            self._has_guessed = True  # the decoder may drop a space at the very beginning
            self.guess = self._decode(self._window + self._run.token_ids)[self._num_out :]
        return ""

    def _end_run(self) -> None:
        """A run that is whole becomes text with the window. One that was broken is out."""
        run, num_given = self._run, self._num_given
        self._run, self._num_given, self._has_guessed = ByteRun(), 0, False
        if run.is_broken:
            return
        if num_given:
            text = self._decode(self._window + run.token_ids[:num_given])
            self._num_out = len(text) if run.is_whole else self._num_out + num_given
        self._window = self._window + run.token_ids

    def _shorten(self, text: str) -> str:
        """Hands out what cannot be the beginning of a character, and forgets its tokens."""
        for num_kept in range(1, _MAX_CHARACTER):
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            head_text = self._decode(head)
            if head_text + self._decode(tail) == text:  # no character lies across the cut
                delta = head_text[self._num_out :]
                self._window, self._num_context = tail, 0
                self._num_out = max(0, self._num_out - len(head_text))
                return delta
        delta = text[self._num_out :]
        self._make_context(self._window[-1:])
        return delta

    def _make_context(self, token_ids: list[int]) -> None:
        self._window, self._num_context = token_ids, len(token_ids)
        is_one = len(token_ids) == 1
        self._num_out = self._tokenizer.length_of(token_ids[0]) if is_one else len(self._decode(token_ids))

    def _start_after(self, prompt: Sequence[int]) -> None:
        """Takes the end of the prompt as context, from the beginning of a character on, and a run that it ends in."""
        first = len(prompt)
        while self._bytes and first > 0 and self._may_be_in_run(prompt[first - 1]):
            first -= 1
        context = [token_id for token_id in prompt[:first][-_MAX_CONTEXT:] if token_id not in self._skipped]
        while self._decode(context).startswith(REPLACEMENT):
            context = context[1:]
        self._make_context(context)
        self._num_out = len(self._decode(context).rstrip(REPLACEMENT))
        for token_id in prompt[first:]:
            if token_id in self._bytes:
                self._push_byte(token_id, self._bytes[token_id])
        self._num_given = len(self._run.token_ids) if self._run.is_whole else 0
        self.guess = ""

    def _may_be_in_run(self, token_id: int) -> bool:
        is_known = token_id in self._bytes or token_id in self._skipped
        return is_known or is_nothing(self._tokenizer, self._bytes, token_id)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
