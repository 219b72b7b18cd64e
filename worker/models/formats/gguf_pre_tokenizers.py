"""Pre-tokenizers that GGUF files name (`tokenizer.ggml.pre`): how a text is split into words before merges. Plain data.

Each entry is that of the models' own tokenizer.json; llama.cpp's names of them are those of its converter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Rules of byte-level BPE."""

    splits: tuple[str, ...] = ()
    """Regular expressions, one after the other: the matches of each are split off."""
    has_words: bool = False
    """Behind them, what is left is split into GPT-2's words."""
    whole_words_first: bool = False
    """A word that is a token is one, whatever merges give."""
    is_composed: bool = False
    """Text is composed (NFC) before."""
    begins_with_bos: bool = False
    """Texts begin with BOS where the file does not say."""

    def normalizer(self) -> Any:
        """The `tokenizers` package's normalizer. None: the text is left as it is."""
        return normalizers.NFC() if self.is_composed else None

    def splitter(self) -> Any:
        """The `tokenizers` package's pre-tokenizer."""
        splits = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in self.splits]
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.has_words)
        return pre_tokenizers.Sequence([*splits, as_bytes]) if splits else as_bytes


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT_FORMS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _letters_and_digits(digits: str) -> str:
    """The expression of cl100k, with runs of this many digits."""
    return rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + _SPACES


def _cased_words(digits: str, short_forms: str, signs: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """The expression of o200k: upper-case letters begin words. `signs`: what may follow signs."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{short_forms}|{before}{upper}+{lower}*{short_forms}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{signs}" + _SPACES


_LLAMA3: Final = PreTokenizer(
    splits=(_letters_and_digits(r"\p{N}{1,3}"),), whole_words_first=True, begins_with_bos=True
)
_LIKE_LLAMA3: Final = PreTokenizer(splits=_LLAMA3.splits)
_QWEN2: Final = PreTokenizer(splits=(_letters_and_digits(r"\p{N}"),), is_composed=True)
_LIKE_QWEN2: Final = replace(_QWEN2, is_composed=False)
_QWEN35: Final = PreTokenizer(
    splits=(
        rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        + _SPACES,
    ),
    is_composed=True,
)
_TEKKEN: Final = PreTokenizer(
    splits=(_cased_words(r"\p{N}", "", r"[\r\n/]*"),), whole_words_first=True, begins_with_bos=True
)
_GPT4O: Final = PreTokenizer(splits=(_cased_words(r"\p{N}{1,3}", f"{_SHORT_FORMS}?", r"[\r\n/]*"),))
_SEED: Final = PreTokenizer(
    splits=(rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+" + _SPACES,)
)
_NOT_HAN: Final = r"&&[^\p{Han}]]"
_KIMI: Final = PreTokenizer(
    splits=(
        r"[\p{Han}]+|"
        + _cased_words(
            r"\p{N}{1,3}",
            f"{_SHORT_FORMS}?",
            r"[\r\n]*",
            upper=_UPPER[:-1] + _NOT_HAN,
            lower=_LOWER[:-1] + _NOT_HAN,
        ),
    ),
    whole_words_first=True,
)
_DEEPSEEK3: Final = PreTokenizer(
    splits=(
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        + _SPACES,
    )
)
_GPT2: Final = PreTokenizer(has_words=True)
_COMPOSED_GPT2: Final = replace(_GPT2, is_composed=True)
_SINGLE_DIGITS: Final = PreTokenizer(splits=(r"\p{N}",), has_words=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon-h1", "lfm2", "pixtral"), _LLAMA3),
    **dict.fromkeys(("falcon3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _LIKE_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan"), _QWEN2),
    **dict.fromkeys(("stablelm2", "megrez", "solar-open"), _LIKE_QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "kimi-k2": _KIMI,
    "seed-coder": _SEED,
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum"), _SINGLE_DIGITS),
    "command-r": replace(_SINGLE_DIGITS, is_composed=True),
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "jais", "trillion", "exaone4", "granite-docling", "phi-2"), _GPT2),
    "olmo": _COMPOSED_GPT2,
}
