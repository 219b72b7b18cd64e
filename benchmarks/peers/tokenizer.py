"""Tokenizer of a random-weight model: a byte-level BPE with exactly as many ids as the model has.

Trained on the source of Python's standard library, which every machine has. A large vocabulary is filled up with pairs
of words, until every id has a spelling, so that turning random ids into text costs what it costs in use.
"""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MAX_TRAINED: Final = 16_384
_MAX_CHARACTERS: Final = 8_000_000


def make_tokenizer(vocab_size: int, max_model_len: int) -> PreTrainedTokenizerFast:
    """The last three ids are special: `eos_token_id` is `vocab_size - 1`."""
    vocab, merges = _filled(*_trained(min(vocab_size, _MAX_TRAINED)), size=vocab_size - len(SPECIAL_TOKENS))
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    first, _, last = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=first,
        eos_token=last,
        pad_token=first,
        clean_up_tokenization_spaces=False,
        model_max_length=max_model_len,
    )
    fast.chat_template = _CHAT
    assert len(fast) == vocab_size
    return fast


def _byte_level(model: Any) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trained(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = _byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return dict(model["vocab"]), [(first, second) for first, second in merges]


def _texts() -> Iterator[str]:
    num_characters = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        num_characters += len(text)
        if num_characters > _MAX_CHARACTERS:
            return
        yield text


def _filled(
    vocab: dict[str, int], merges: list[tuple[str, str]], size: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Exactly `size` words: made-up merges are added at the end, or the youngest are taken away."""
    words = [word for word in vocab if word.isascii() and word.isalpha() and 2 <= len(word) <= 6]
    for first, second in ((first, second) for first in words for second in words):
        if len(vocab) >= size:
            break
        if first + second not in vocab:
            vocab[first + second] = len(vocab)
            merges.append((first, second))
    while len(vocab) > size:
        vocab.pop("".join(merges.pop()))
    assert sorted(vocab.values()) == list(range(size))
    return vocab, merges
