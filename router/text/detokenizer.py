"""Token ids to text while they arrive: what is handed out never changes, and never ends within a character.

Tokens do not decode one by one: a character may be spread over several of them, and some decoders drop the space in
front of the first. So a short window is decoded again with each token, led by tokens whose text is out already:

    window:  [ context: its text is out | pending: its text is not out, or not all of it ]
"""

from collections.abc import Sequence
from typing import Final

from holdfast.router.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""

_MAX_CONTEXT: Final = 6
_MAX_WINDOW: Final = 24
"""Far more tokens than a character can have: they are bytes that will never make one."""

_MAX_CHARACTER: Final = 4
"""Bytes of a character, and so the most tokens it can be spread over."""


class IncrementalDetokenizer:
    """Text of one sequence: what `push` returns, and `finish` in the end, adds up to the text of all tokens.

    That is `tokenizer.decode` of `context` and all tokens, less the text of `context`: the end of the prompt, on which
    it depends whether the output begins with a space. One case differs. Some tokenizers fall back to tokens of single
    bytes, and decode a run of them as U+FFFD altogether if it is not UTF-8; what was out before stays.

    A token costs the decoding of a window, at most of two, however long the sequence is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._num_context = 0
        self._num_out = 0
        """Characters of the window's text that are out."""
        self._start_after(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain."""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def finish(self) -> str:
        """What was held back. Bytes that still wait for the rest of their character become U+FFFD."""
        rest = self._decode(self._window)[self._num_out :]
        self._window, self._num_context, self._num_out = [], 0, 0
        return rest

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        delta = certain[self._num_out :]
        if delta and len(certain) == len(text):
            self._make_context(self._window[self._num_context :])
            return delta
        self._num_out += len(delta)
        return delta if len(self._window) <= _MAX_WINDOW else delta + self._shorten(text)

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
        """Takes the end of the prompt as context, from the beginning of a character on."""
        context = [token_id for token_id in prompt[-_MAX_CONTEXT:] if token_id not in self._skipped]
        while self._decode(context).startswith(_REPLACEMENT):
            context = context[1:]
        self._make_context(context)
        self._num_out = len(self._decode(context).rstrip(_REPLACEMENT))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
