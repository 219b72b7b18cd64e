"""Incremental detokenizer: token ids to text as they arrive. Released text never changes or ends within a character.

Tokens cannot be decoded one by one: a character may span several of them, and some decoders drop the space in front of
the first. So a short window is decoded again with each token. It begins with tokens whose text was released:

    window:  [ context: its text was released | pending: its text was not, or not all of it ]

A run of byte tokens is decoded as a whole, so it joins the window only when it ends.
"""

from collections.abc import Sequence
from typing import Final

from holdfast.router.text.token_table import REPLACEMENT, is_nothing
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.utf8 import Utf8Decoder

_MAX_CONTEXT: Final = 6  # tokens of the prompt
_MAX_WINDOW: Final = 24
"""Far more tokens than a character can have: such a window is bytes that never become one."""

_MAX_CHARACTER: Final = 4
"""Bytes of a character, and so the most tokens it can be spread over."""


class ByteRun:
    """The run of byte tokens at the end of the tokens so far. It may be empty."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_broken = False
        """Whether it is invalid UTF-8, whatever follows."""
        self._decoder = Utf8Decoder()

    @property
    def is_whole(self) -> bool:
        """Whether it is valid and does not end within a character."""
        return not self.is_broken and not self._decoder.getstate()[0]

    def push(self, token_id: int, byte: int) -> str:
        """The characters completed by this byte. They change if the run turns invalid later."""
        if self.is_broken:
            return ""
        self.token_ids.append(token_id)
        try:
            return self._decoder.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self.is_broken = True
            return ""


class IncrementalDetokenizer:
    """The text of one sequence: the results of `push` and of the final `finish` concatenate to the text of all tokens.

    That is `tokenizer.decode` of `context` and all tokens, without the text of `context`, the end of the prompt: it
    decides whether the output begins with a space. One case differs: a prompt that ends in a run of byte tokens keeps
    its own text, even if the output's bytes make the run invalid.

    Each token decodes at most two windows, however long the sequence is.
    """

    __slots__ = (
        "_bytes",
        "_decode",
        "_has_guessed",
        "_lengths",
        "_num_context",
        "_num_given",
        "_num_out",
        "_run",
        "_skipped",
        "_tokenizer",
        "_vocab_size",
        "_window",
        "guess",
    )

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._vocab_size = tokenizer.vocab_size
        self._decode = tokenizer.decode_known
        self._lengths = tokenizer.lengths
        self._window: list[int] = []
        self._num_context = 0
        self._num_out = 0
        """Characters of the window's text that were released."""
        self._bytes = tokenizer.fallback_bytes
        self._run = ByteRun()
        self._num_given = 0
        """Tokens of the run that belong to the prompt, if they are whole characters."""
        self._has_guessed = False
        self.guess = ""
        """The text that the last token adds to its run of byte tokens, if the run stays valid."""
        if context:
            self._start_after(context)

    @property
    def is_guessing(self) -> bool:
        """Whether the tokens end in a run that may still turn invalid."""
        return bool(self._run.token_ids) and not self._run.is_broken

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is now final. Unknown ids have no text."""
        self.guess = ""
        texts: list[str] = []
        for token_id in token_ids:
            if token_id not in self._skipped and token_id < self._vocab_size:
                texts.append(self._push_one(token_id))
        return "".join(texts)

    def push_one(self, token_id: int) -> str:
        """Like `push`, for one token, as in nearly every step."""
        window = self._window
        if len(window) != self._num_context or token_id in self._bytes or self._run.token_ids:
            return self.push((token_id,))
        if token_id in self._skipped or token_id >= self._vocab_size:
            return ""
        text = self._decode([*window, token_id])
        delta = text[self._num_out :]
        if not delta or text[-1] == REPLACEMENT:
            return self.push((token_id,))
        self._window, self._num_context = [token_id], 1
        length = self._lengths.get(token_id)
        self._num_out = self._tokenizer.length_of(token_id) if length is None else length
        return delta

    def finish(self) -> str:
        """The text that was held back. Bytes of an incomplete character become U+FFFD."""
        if not self._window and not self._run.token_ids:
            return ""
        if self._run.token_ids:
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
        certain = text.rstrip(REPLACEMENT) if text.endswith(REPLACEMENT) else text
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
        """Moves a valid run into the window. The text of an invalid one was released already."""
        run, num_given = self._run, self._num_given
        self._run, self._num_given, self._has_guessed = ByteRun(), 0, False
        if run.is_broken:
            return
        if num_given:
            text = self._decode(self._window + run.token_ids[:num_given])
            self._num_out = len(text) if run.is_whole else self._num_out + num_given
        self._window = self._window + run.token_ids

    def _shorten(self, text: str) -> str:
        """Releases the text that cannot be part of a later character, and drops its tokens."""
        for num_kept in range(1, _MAX_CHARACTER):
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            head_text = self._decode(head)
            if head_text + self._decode(tail) == text:  # no character spans the cut
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
        """Takes as context the end of the prompt, from the start of a character, and the run that it ends in."""
        first = len(prompt)
        while self._bytes and first > 0 and self._may_be_in_run(prompt[first - 1]):
            first -= 1
        context: list[int] = []
        for token_id in prompt[:first][-_MAX_CONTEXT:]:
            if token_id not in self._skipped and token_id < self._vocab_size:
                context.append(token_id)
        text = self._decode(context)
        while text.startswith(REPLACEMENT):
            context = context[1:]
            text = self._decode(context)
        self._window, self._num_context = context, len(context)
        self._num_out = len(text.rstrip(REPLACEMENT))
        if first < len(prompt):
            self._start_in_run(prompt[first:])

    def _start_in_run(self, token_ids: Sequence[int]) -> None:
        """Takes the run that the prompt ends in."""
        for token_id in token_ids:
            if token_id in self._bytes:
                self._push_byte(token_id, self._bytes[token_id])
        self._num_given = len(self._run.token_ids) if self._run.is_whole else 0
        self.guess = ""

    def _may_be_in_run(self, token_id: int) -> bool:
        is_known = token_id in self._bytes or token_id in self._skipped
        return is_known or is_nothing(self._tokenizer, self._bytes, token_id)
