"""Tokens with their text: where log-probabilities are streamed, a token is sent with the beginning of its text.

Text that may become a stop string is held back, and its tokens with it: so every offset points into the text that was
sent, also where a stop string removes the text of several tokens.
"""

from collections.abc import Sequence
from typing import Final

from holdfast.router.generation import OutputDelta
from holdfast.router.text.token_table import REPLACEMENT, is_nothing
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.utf8 import Utf8Decoder
from holdfast.worker.request import TokenLogprob
from holdfast.worker.sampling_params import SamplingParams

_MAX_CONTEXT: Final = 6  # tokens


class TextOffsets:
    """Offsets of a sequence's tokens in its text, which goes on after that of `prompt_token_ids`. They do not depend on
    how tokens are cut into deltas.
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
        tokens that it writes out have a length, and no others.
        """
        self._tokenizer = tokenizer
        hides = params.skip_special_tokens or bool(text)
        self._skipped = tokenizer.special_token_ids if hides else frozenset[int]()
        self._has_text = params.detokenize
        self._text = text
        self._at = start
        """Characters before the last run of byte tokens, and before an incomplete character."""
        self._utf8 = Utf8Decoder("replace")
        self._run = _Run()
        self._context: list[int] | None = None
        """Tokens before the first one; None after that."""
        self._start_after(prompt_token_ids)

    def push(self, token_id: int) -> int:
        """The offset of the next token."""
        if not self._is_shown(token_id):
            return self._hidden_offset(token_id)
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

    def _hidden_offset(self, token_id: int) -> int:
        """The offset of a token that is not shown: unless the text that is known says otherwise, it has no length."""
        at = self._at + self._run.num_chars
        written = self._tokenizer.tokens.text_of(token_id)
        if written and self._text.startswith(written, at):
            self._at += len(written)
            if self._context is not None:
                self._context.append(token_id)
        return at

    def _new_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; the first has what its decoder writes at the beginning of a text, such as no space."""
        data, context = self._tokenizer.tokens.bytes_of(token_id), self._context
        if context is None:
            return data
        self._context = None
        before = self._tokenizer.decode_known(context)
        shown = self._tokenizer.decode_known([*context, token_id])[len(before) :]
        if self._text and not self._text.startswith(shown, self._at):
            shown = shown.removeprefix(" ")
        return data if REPLACEMENT in shown or self._utf8.getstate()[0] or not before.isascii() else shown.encode()

    def _ends_character(self, data: bytes) -> bool:
        """Whether bytes that were waiting for the rest of their character do not get it from `data`."""
        waiting, _ = self._utf8.getstate()
        if not waiting or not data:
            return False
        strict = Utf8Decoder()
        try:
            strict.decode(waiting + data[:1])
        except UnicodeDecodeError:
            return True
        return False

    def _start_after(self, prompt: Sequence[int]) -> None:
        """Starts after a prompt whose last bytes may be part of the output's first character, as in
        `IncrementalDetokenizer`.
        """
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
        self._utf8 = Utf8Decoder()

    @property
    def num_chars(self) -> int:
        """Complete characters so far, without the prompt's."""
        return self.num_bytes - self._given_bytes if self._is_broken else self._num_shown

    @property
    def _num_shown(self) -> int:
        return self._num_whole - self._given_chars - self._num_dropped

    @property
    def final_num_chars(self) -> int:
        """Characters of the run if it ends here."""
        return self.num_bytes - self._given_bytes if self._utf8.getstate()[0] else self.num_chars

    def give(self) -> None:
        """Gives the text so far to the prompt, unless it ends within a character."""
        if self._is_broken or not self._utf8.getstate()[0]:
            self._given_bytes, self._given_chars = self.num_bytes, self._num_whole

    def push(self, data: bytes, *, is_dropped: bool = False) -> None:
        self.num_bytes += len(data)
        self._num_dropped += is_dropped
        try:
            self._num_whole += len(self._utf8.decode(data))
        except UnicodeDecodeError:
            self._is_broken = True


class TokensWithText:
    """Tokens of one choice in step with their text. All input comes out, in order; a delta may come out without tokens,
    and its tokens with a later delta.
    """

    def __init__(self, offsets: TextOffsets) -> None:
        """`offsets` must not be shared: it gets every token."""
        self._offsets = offsets
        self._held: list[tuple[int, TokenLogprob, int]] = []
        """Token, log-probability, offset."""
        self._num_reported = 0
        self._num_chars = 0

    @property
    def holds(self) -> bool:
        """Whether tokens wait. Then the client cannot resume here: their log-probabilities are computed once."""
        return bool(self._held)

    def of(self, delta: OutputDelta) -> OutputDelta | None:
        """The delta to send now; None: nothing yet. The text that the client of a resumed stream already has is
        skipped, without log-probabilities.
        """
        self._num_chars += len(delta.text)
        if len(delta.logprobs) < len(delta.token_ids):
            for token_id in delta.token_ids:
                self._offsets.push(token_id)
            self._num_reported += len(delta.token_ids)
            return delta
        for token_id, said in zip(delta.token_ids, delta.logprobs, strict=True):
            self._held.append((token_id, said, self._offsets.push(token_id)))
        count = len(self._held) if delta.finish_reason is not None else self._num_begun()
        ready, self._held = self._held[:count], self._held[count:]
        if not (ready or delta.text or delta.finish_reason is not None):
            return None
        first = self._num_reported
        self._num_reported += count
        return delta._replace(
            first_token_index=first,
            token_ids=tuple(token_id for token_id, _, _ in ready),
            logprobs=tuple(said for _, said, _ in ready),
        )

    def _num_begun(self) -> int:
        """Waiting tokens whose text has been sent in part."""
        waiting = (at for at, (_, _, offset) in enumerate(self._held) if offset >= self._num_chars)
        return next(waiting, len(self._held))
