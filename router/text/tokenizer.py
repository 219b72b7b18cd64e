"""Tokenizer of one model, loaded from its folder: text to token ids and back, special tokens, and the chat template.

Uses the `tokenizers` library for tokenizer.json, because importing transformers takes seconds; only a folder without
that file needs transformers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from holdfast.router.text.dsml_templates import DSML_TEMPLATES
from holdfast.router.text.token_table import TokenTable, fallback_bytes
from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from holdfast.worker.special_tokens import configured_special, generation_ends, named_tokens, read_json

if TYPE_CHECKING:
    import tokenizers

_LONG: Final = 2**10
"""Number of characters, or token ids, from which on the library is called without Python's lock: 512 KiB of text take
it a second.
"""

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
"""Names of chat templates, as transformers has them."""


class EncodedPair(NamedTuple):
    """Two texts in one prompt."""

    token_ids: list[int]
    texts: list[int | None]
    """Which text each token is of, 0 or 1; None: it is one of those around them."""
    second_start: int
    """Place of the first token that is counted to the second text (token type 1); 0: none is."""


class Codec(Protocol):
    """The library that a `Tokenizer` wraps."""

    vocab_size: int
    """One more than the highest token id."""
    special_token_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Raises `TooManyTokensError` for more tokens than `most`."""

    def encode_pair(self, first: str, second: str, most: int | None = None) -> EncodedPair:
        """Raises as `encode` does, and `InvalidRequestError` if it does not join two texts."""

    def beginning(self, text: str, num_tokens: int) -> str:
        """Raises as `encode` does."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def token(self, token_id: int) -> str | None:
        """Spelling in the vocabulary."""


class TooManyTokensError(Exception):
    """A text has more tokens than the caller's limit."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class Tokenizer:
    """Encodes and decodes for one model. Thread-safe: it only caches."""

    def __init__(
        self,
        codec: Codec,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None = None,
        eos_token_id: int | None = None,
        json_path: Path | None = None,
    ) -> None:
        self._codec = codec
        self.special_tokens = MappingProxyType(dict(special_tokens))
        """`bos_token`, `eos_token`, ... as templates name them."""
        self.chat_templates = _named_templates(chat_template)
        """Templates by name: `default` for any chat, `tool_use` for those with tools, and others that requests name."""
        self.eos_token_id = eos_token_id
        """The tokenizer's own end of sequence. A model may have more of them: see `ModelInfo.eos_token_ids`."""
        self.json_path = json_path
        """Path of its tokenizer.json, if it has one."""
        self.vocab_size = codec.vocab_size
        self.special_token_ids = codec.special_token_ids
        """The ids that decoding skips."""
        self.fallback_bytes = fallback_bytes(codec)
        """The byte of each byte-fallback token, by token id (see `token_table.py`)."""
        self.tokens = TokenTable(codec, self.fallback_bytes)
        """Texts and bytes of single tokens."""
        self.decode_known: Callable[[list[int]], str] = partial(codec.decode, skip_special_tokens=False)
        """Like `decode`, special tokens included, for ids that the tokenizer knows: streams call it for every token."""
        self.lengths: dict[int, int] = {}
        """Results of `length_of` so far."""

    @classmethod
    def load(cls, path: str) -> "Tokenizer":
        """The tokenizer of a local Hugging Face folder. Raises `ConfigurationError` if it cannot be read."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigurationError(f"no tokenizer at {path}: it is not a folder; give the model's local folder")
        special_tokens = named_tokens(folder)
        json_path = folder / "tokenizer.json"
        codec = _FastCodec.load(folder, special_tokens) if json_path.is_file() else _SlowCodec.load(folder)
        return cls(
            codec,
            special_tokens=special_tokens,
            chat_template=_chat_templates(folder),
            eos_token_id=_eos_token_id(folder, codec, special_tokens),
            json_path=json_path if json_path.is_file() else None,
        )

    def with_chat_template(self, chat_template: str) -> "Tokenizer":
        """The same with another chat template."""
        other = copy(self)
        other.chat_templates = _named_templates(chat_template)
        return other

    @property
    def chat_template(self) -> str | None:
        """Template of a chat without tools."""
        return self.chat_templates.get(_DEFAULT)

    def template_of(self, *, has_tools: bool = False, name: str = "") -> str | None:
        """The chat template of a chat, as transformers chooses it. Raises `InvalidRequestError` for a name that is not
        an adapter of this model.
        """
        if name and name not in self.chat_templates:
            names = ", ".join(sorted(self.chat_templates)) or "none, for it has no chat template"
            raise InvalidRequestError("chat_template", name, f"must be a name of this model's templates: {names}")
        if name:
            return self.chat_templates[name]
        used = _WITH_TOOLS if has_tools and _WITH_TOOLS in self.chat_templates else _DEFAULT
        return self.chat_templates.get(used)

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds the tokens that the model expects around a text, such as BOS.

        Raises `TooManyTokensError` for more than `most`, before a list of them is made: a list of half a million holds
        Python's lock for 10 ms, and its end for 5.
        """
        try:
            return self._codec.encode(text, add_special_tokens, most)
        except UnicodeEncodeError as error:
            raise InvalidRequestError("text", text, f"must be valid Unicode: {error.reason}") from None

    def encode_pair(self, first: str, second: str, most: int | None = None) -> EncodedPair:
        """Two texts in one prompt, joined as the tokenizer joins them. Raises as `encode` does, and
        `InvalidRequestError` for a tokenizer that does not join texts.
        """
        return self._codec.encode_pair(first, second, most)

    def beginning(self, text: str, num_tokens: int) -> str:
        """The beginning of a text that has this many tokens at most, without those around a text. Raises as `encode`
        does.
        """
        return self._codec.beginning(text, num_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Bytes that are invalid UTF-8 become U+FFFD, and unknown ids are skipped.

        Unknown ids are no error, because a model's vocabulary may be padded beyond the tokenizer's.
        """
        known = [i for i in token_ids if 0 <= i < self.vocab_size]
        if len(known) >= _LONG and isinstance(self._codec, _FastCodec):
            return self._codec.decode_many(known, skip_special_tokens)
        return self._codec.decode(known, skip_special_tokens)

    def length_of(self, token_id: int) -> int:
        """Characters of a single token, special or not. Cached."""
        length = self.lengths.get(token_id)
        if length is None:
            length = self.lengths[token_id] = len(self.decode((token_id,), skip_special_tokens=False))
        return length


class _FastCodec:
    """A tokenizer.json, with the `tokenizers` library."""

    def __init__(
        self, tokenizer: "tokenizers.Tokenizer", also_special: Iterable[str | int] = (), *, has_types: bool = True
    ) -> None:
        """`also_special` are tokens, or ids of added tokens, that tokenizer.json does not mark as special; `has_types`:
        whether the model takes token types.
        """
        self._has_types = has_types
        tokenizer.no_truncation()  # a file may contain the settings of the training
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._reading = Lock()
        """One list of ids is made at a time: that holds Python's lock, and an event loop is to get it in between."""
        added = tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        named = {i if isinstance(i, int) else tokenizer.token_to_id(i) for i in also_special}
        marked = {i for i, token in added.items() if token.special}
        self._also_special = frozenset(i for i in named - marked if i is not None)
        self.special_token_ids = frozenset(marked) | self._also_special

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> "_FastCodec":
        from tokenizers import Tokenizer as Fast

        path = folder / "tokenizer.json"
        try:
            tokenizer = Fast.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError(f"cannot read {path}: {error}; fetch the model again") from error
        added = tokenizer.get_added_tokens_decoder()
        ends = (i for i in generation_ends(folder) if i in added)
        inputs = read_json(folder / "tokenizer_config.json").get("model_input_names")
        has_types = not isinstance(inputs, list) or "token_type_ids" in inputs
        return cls(tokenizer, [*special_tokens.values(), *configured_special(folder), *ends], has_types=has_types)

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        text.encode()  # raises UnicodeEncodeError; the library's own error says less
        if len(text) < _LONG:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and (num_tokens := len(encoding)) > most:
            del encoding  # 250 bytes for each character, which the error's traceback would keep
            raise TooManyTokensError(num_tokens)
        if len(text) < _LONG:
            return encoding.ids
        with self._reading:
            return encoding.ids

    def encode_pair(self, first: str, second: str, most: int | None = None) -> EncodedPair:
        if not self._tokenizer.num_special_tokens_to_add(is_pair=True):
            raise _joins_no_texts()
        (encoding,) = self._tokenizer.encode_batch_fast([(first, second)])
        if most is not None and (num_tokens := len(encoding)) > most:
            del encoding
            raise TooManyTokensError(num_tokens)
        with self._reading:
            return _pair(encoding.ids, encoding.sequence_ids, encoding.type_ids if self._has_types else ())

    def beginning(self, text: str, num_tokens: int) -> str:
        while text:
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
            if len(encoding) <= num_tokens:
                break
            with self._reading:
                ends = encoding.offsets
            end = min(ends[num_tokens - 1][1], ends[num_tokens][0]) if num_tokens else 0
            text = text[: min(end, len(text) - 1)]  # a shorter text may have tokens of its own
        return text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens and self._also_special:
            token_ids = [i for i in token_ids if i not in self._also_special]
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_many(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The same, without Python's lock."""
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)


class _SlowCodec:
    """Any other format that transformers supports, such as a sentencepiece model without tokenizer.json."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.special_token_ids = frozenset(tokenizer.all_special_ids)

    @classmethod
    def load(cls, folder: Path) -> "_SlowCodec":
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False))
        except Exception as error:  # each format raises its own kinds
            way_out = "a model folder needs a tokenizer.json, or files that transformers' AutoTokenizer can read"
            raise ConfigurationError(f"no tokenizer in {folder}: {way_out} ({error})") from error

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        text.encode()
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if most is not None and len(token_ids) > most:
            raise TooManyTokensError(len(token_ids))
        return token_ids

    def encode_pair(self, first: str, second: str, most: int | None = None) -> EncodedPair:
        if not (self._tokenizer.is_fast and self._tokenizer.num_special_tokens_to_add(pair=True)):
            raise _joins_no_texts()
        found = self._tokenizer([first], [second])
        if most is not None and len(found["input_ids"][0]) > most:
            raise TooManyTokensError(len(found["input_ids"][0]))
        return _pair(found["input_ids"][0], found.sequence_ids(0), found.get("token_type_ids", [()])[0])

    def beginning(self, text: str, num_tokens: int) -> str:
        while text and len(token_ids := self.encode(text, False)) > num_tokens:
            text = text[: min(len(self.decode(token_ids[:num_tokens], False)), len(text) - 1)]
        return text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        return cast("int | None", self._tokenizer.get_vocab().get(token))

    def token(self, token_id: int) -> str | None:
        return cast("str | None", self._tokenizer.convert_ids_to_tokens(token_id))


def _pair(token_ids: list[int], texts: list[int | None], types: Sequence[int]) -> EncodedPair:
    return EncodedPair(token_ids, texts, types.index(1) if 1 in types else 0)


def _joins_no_texts() -> InvalidRequestError:
    limit = "has a tokenizer that joins no texts: set model.score_template, with {query} and {document}"
    return InvalidRequestError("model", None, limit)


def _named_templates(given: str | Mapping[str, str] | None) -> Mapping[str, str]:
    named = {_DEFAULT: given} if isinstance(given, str) else given or {}
    return MappingProxyType(dict(named))


def _chat_templates(folder: Path) -> dict[str, str]:
    """chat_template.jinja and the files of additional_chat_templates; else those of tokenizer_config.json; else that of
    a model type whose files have an encoder in Python.
    """
    files = {_DEFAULT: folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    given = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    if not given:
        given = DSML_TEMPLATES.get(str(read_json(folder / "config.json").get("model_type")))
    named = given if isinstance(given, dict) else {_DEFAULT: given}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _eos_token_id(folder: Path, codec: Codec, special_tokens: Mapping[str, str]) -> int | None:
    if "eos_token" in special_tokens:
        return codec.token_id(special_tokens["eos_token"])
    return next(iter(generation_ends(folder)), None)
