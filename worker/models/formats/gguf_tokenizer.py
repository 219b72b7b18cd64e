"""Tokenizer of a GGUF file: its vocabulary and rules as the files that a Hugging Face folder has for them.

A GGUF file names its pre-tokenizer instead of writing it down. The known names have the meaning of the models' own
tokenizer.json; an unknown one is refused, because a wrong one gives worse answers and no error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from holdfast.worker.models.formats.gguf_metadata import NotUnderstood
from holdfast.worker.models.formats.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Types of tokens, as llama.cpp numbers them; 6 is a byte."""

_SPACE: Final = "▁"
_WITH_SPACES: Final = frozenset({"llama", "gemma4"})
"""Kinds whose tokens have spaces as `_SPACE`, and bytes of unknown characters as tokens of their own."""

_NAMED: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS: Final = ("eos", "eot", "eom")
_ENDS_OF_TURNS: Final = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>"})
"""Control tokens that end an answer where the file names none, by their texts."""
_ENDS_OF_HARMONY: Final = ("<|return|>", "<|call|>")
"""Ends of gpt-oss's answers, which have several messages, each with `<|end|>` behind it."""


class GgufTokenizer:
    """The tokenizer that metadata describe."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        """Raises `NotUnderstood`."""
        self._metadata = metadata
        self._tokens: Sequence[str] = self._items("tokens", str)
        self._types: Sequence[int] = self._items("token_type", int) or [_NORMAL] * len(self._tokens)
        self._pre = str(self._get("pre", "default"))
        self._is_gemma = architecture.startswith("gemma")
        if not self._tokens or len(self._types) != len(self._tokens):
            raise NotUnderstood(f"has {len(self._tokens)} tokens and types of {len(self._types)}")
        kind = str(self._get("model"))
        if kind == "gpt2":
            self.tokenizer = self._byte_level()
        elif kind in _WITH_SPACES:
            self.tokenizer = self._with_spaces()
        else:
            raise NotUnderstood(f"has a tokenizer of kind {kind!r}; supported kinds are gpt2, llama and gemma4")
        self._add_tokens()
        self._add_ends()

    def files(self) -> dict[str, Any]:
        """Content by file name, written as JSON, but for tokenizer.json, which is `tokenizer`."""
        template = self._chat_template()
        named = {name: self._named(key) for name, key in _NAMED.items()}
        config: dict[str, Any] = {name: text for name, text in named.items() if text is not None}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if template is not None:
            config["chat_template"] = template
        generation = {"eos_token_id": self._end_ids()} if self._end_ids() else {}
        return {"tokenizer_config.json": config, "generation_config.json": generation}

    def _chat_template(self) -> str | list[dict[str, str]] | None:
        """One, or several by their names, as a tokenizer_config.json has them."""
        template = self._metadata.get("tokenizer.chat_template")
        names = _items(self._metadata, "tokenizer.chat_templates", str)
        others = {name: self._metadata.get(f"tokenizer.chat_template.{name}") for name in names}
        if not any(others.values()):
            return None if template is None else str(template)
        found = {"default": template, **others}
        return [{"name": name, "template": str(text)} for name, text in found.items() if text is not None]

    def _items(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        return _items(self._metadata, f"tokenizer.ggml.{key}", kind)

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _id(self, key: str) -> int | None:
        found = self._get(f"{key}_token_id")
        if found is None:
            return None
        if not isinstance(found, int) or not 0 <= found < len(self._tokens):
            raise NotUnderstood(f"has {key}_token_id = {found}, and {len(self._tokens)} tokens")
        return found

    def _named(self, key: str) -> str | None:
        found = self._id(key)
        return None if found is None else self._tokens[found]

    def _end_ids(self) -> list[int]:
        ids = [self._id(key) for key in _ENDS]
        texts = {text: i for i, text in enumerate(self._tokens) if self._types[i] == _CONTROL}
        if all(text in texts for text in _ENDS_OF_HARMONY):
            ids = [ids[0], *(texts[text] for text in _ENDS_OF_HARMONY)]
        elif ids[1] is None:
            ids += [texts[text] for text in texts if text in _ENDS_OF_TURNS]
        return list(dict.fromkeys(i for i in ids if i is not None))

    def _vocabulary(self) -> dict[str, int]:
        """Vocabulary without tokens that only fill the table up."""
        kept = enumerate(zip(self._tokens, self._types, strict=True))
        return {text: i for i, (text, kind) in kept if kind != _UNUSED or text != f"[PAD{i}]"}

    def _byte_level(self) -> Tokenizer:
        rules = self._rules()
        merges = [tuple(merge.split(" ")) for merge in self._items("merges", str)]
        if not merges:
            raise NotUnderstood("has no merges of tokens (tokenizer.ggml.merges)")
        tokenizer = _bpe(self._vocabulary(), merges, ignore_merges=rules.whole_words_first)
        if normalizer := rules.normalizer():
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = rules.splitter()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _rules(self) -> PreTokenizer:
        found = PRE_TOKENIZERS.get(self._pre)
        if found is None:
            raise NotUnderstood(f"names a pre-tokenizer {self._pre!r}, which is not known")
        return found

    def _with_spaces(self) -> Tokenizer:
        """Merges are by ranks of tokens, as SentencePiece has them, unless the file has them."""
        vocabulary = self._vocabulary()
        if self._is_gemma:  # whose tokens of spaces are written as such
            vocabulary = {_SPACE * len(text) if not text.strip(" ") else text: i for text, i in vocabulary.items()}
        merges: Sequence[Any] = [tuple(merge.split(" ")) for merge in self._items("merges", str)]
        merges = merges or _merges(vocabulary, self._ranks(vocabulary), self._mergeable(vocabulary))
        tokenizer = _bpe(vocabulary, merges, unk_token=self._named("unknown"), fuse_unk=True, byte_fallback=True)
        has_prefix = self._get("add_space_prefix", not self._is_gemma)
        prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer

    def _ranks(self, vocabulary: Mapping[str, int]) -> Sequence[float]:
        """Rank by token id: the lower, the earlier two parts become this token. Gemma's ranks are its ids, not its
        scores.
        """
        if self._is_gemma:
            return range(len(self._tokens))
        scores = self._items("scores", (int, float))
        if len(scores) != len(self._tokens):
            raise NotUnderstood(f"has scores of {len(scores)} tokens, and {len(self._tokens)} tokens")
        return [-score for score in scores]

    def _mergeable(self, vocabulary: Mapping[str, int]) -> set[str]:
        return {text for text, i in vocabulary.items() if self._types[i] in (_NORMAL, _USER_DEFINED)}

    def _add_tokens(self) -> None:
        """All at once: each call makes the search for them anew."""
        known = [
            (text, self._types[i]) for text, i in self._vocabulary().items() if self.tokenizer.token_to_id(text) == i
        ]
        special = [text for text, kind in known if kind in (_CONTROL, _UNKNOWN)]
        plain = [text for text, kind in known if kind == _USER_DEFINED]
        self.tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
        self.tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])

    def _add_ends(self) -> None:
        """The tokens that a text begins and ends with."""
        by_default = self._get("model") in _WITH_SPACES or self._rules().begins_with_bos
        begin = self._named("bos") if self._get("add_bos_token", by_default) else None
        end = self._named("eos") if self._get("add_eos_token", False) else None
        around = [text for text in (begin, end) if text is not None]
        parts = [*([begin] if begin else []), "$A", *([end] if end else [])]
        template = processors.TemplateProcessing(
            single=" ".join(parts),
            pair=f"{' '.join(parts)} {' '.join(part.replace('$A', '$B') for part in parts)}",
            special_tokens=[(text, self.tokenizer.token_to_id(text)) for text in around],
        )
        is_byte_level = self._get("model") == "gpt2"
        if around:
            self.tokenizer.post_processor = template
        elif is_byte_level:
            self.tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)


def _items(metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> list[Any]:
    """A list of such items; none where the key is missing."""
    found = metadata.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise NotUnderstood(f"has {key} = {str(found)[:100]}: must be a list of such as tokenizers have")
    return found


def _bpe(vocabulary: dict[str, int], merges: Sequence[Any], **settings: Any) -> Tokenizer:
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise NotUnderstood(f"has a merge of {len(wrong)} parts")
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), **settings))
    except Exception as error:  # the library raises bare Exception
        raise NotUnderstood(f"has a vocabulary that is not a BPE vocabulary: {error}") from error


def _merges(vocabulary: Mapping[str, int], ranks: Sequence[float], mergeable: set[str]) -> list[tuple[str, str]]:
    """The pairs of tokens that merge into a token, in the order of merging."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for text in mergeable:
        rank = ranks[vocabulary[text]]
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                found.append((rank, vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(found)]
