"""Real tokenizers of the common kinds, trained on the spot on a few words: small, but with all the traps."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from holdfast.router.text.tokenizer import Tokenizer

WORDS = "the quick brown fox jumps over the lazy dog and the hen says good morning to the other hens\n"
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]
KINDS = ["byte_level", "byte_fallback", "gemma", "metaspace", "byte_names", "unigram", "word_piece"]


def byte_level() -> Fast:
    """As in GPT-2 and Llama 3. It saw only ASCII, so every other character is spread over tokens of one byte."""
    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Fast:
    """As in Llama 2: spaces are ▁, one stands before the text, unknown characters become tokens of one byte."""
    pieces = _pieces()
    singles = [*SPECIAL_TOKENS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: index for index, token in enumerate([*singles, *pieces["vocab"]])}
    merges = [tuple(merge) for merge in pieces["merges"]]
    tokenizer = Fast(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def gemma() -> Fast:
    """As in Gemma: byte fallback, and no space is dropped. There are ids without a token, and a token of U+FFFD."""
    tokenizer = byte_fallback()
    described = json.loads(tokenizer.to_str())
    vocab = described["model"]["vocab"]
    described["model"]["vocab"] = {token: index + (10 if index > 100 else 0) for token, index in vocab.items()}
    described["model"]["vocab"]["\ufffd"] = len(vocab) + 10
    described["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    described["decoder"]["decoders"].pop()
    return Fast.from_str(json.dumps(described))


def byte_names() -> Fast:
    """Tokens that look like bytes and are text."""
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Fast(models.WordLevel(vocab=names | {"fox": 256, "<unk>": 257}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def metaspace() -> Fast:
    """As in T5: the decoder drops the space of the first token."""
    tokenizer = Fast(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=[*SPECIAL_TOKENS, "<unk>"])
    tokenizer.train_from_iterator([WORDS + "äöü 日本"], trainer)
    return tokenizer


def unigram() -> Fast:
    """As in T5 and ALBERT, by likelihoods."""
    tokenizer = Fast(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special_tokens = [*SPECIAL_TOKENS, "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special_tokens, unk_token="<unk>")
    tokenizer.train_from_iterator([WORDS], trainer)
    return tokenizer


def word_piece() -> Fast:
    """As in BERT: tokens are words, and ## goes on with one."""
    tokenizer = Fast(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=[*SPECIAL_TOKENS, "<unk>"])
    tokenizer.train_from_iterator([WORDS], trainer)
    return tokenizer


@cache
def loaded(kind: str, root: Path) -> Tokenizer:
    """The tokenizer of that kind, through a folder under `root`, as Holdfast reads it."""
    folder = root / kind
    makers = {
        maker.__name__: maker
        for maker in (byte_level, byte_fallback, gemma, metaspace, byte_names, unigram, word_piece)
    }
    write(folder, makers[kind]())
    return Tokenizer.load(str(folder))


def write(folder: Path, tokenizer: Fast, **settings: object) -> None:
    """A model folder's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def any_tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, also some beyond the vocabulary, and where there are bytes many of them, mostly of characters."""
    ids = {byte: token_id for token_id, byte in tokenizer.fallback_bytes.items()}
    pieces = st.integers(0, tokenizer.vocab_size + 3).map(lambda token_id: [token_id])
    if ids:
        texts = st.sampled_from(["A", " ", "\n", "é", "日", "👍", "▁", "\ufffd", "a\u0301"])
        spelled = texts.map(lambda text: [ids[byte] for byte in text.encode()])
        pieces |= (
            spelled | spelled | st.sampled_from([0x41, 0x20, 0xC3, 0xF0, 0x9F, 0xFF]).map(lambda byte: [ids[byte]])
        )
    return st.lists(pieces, max_size=20).map(lambda found: [token_id for piece in found for token_id in piece])


def groupings(token_ids: list[int]) -> st.SearchStrategy[list[Sequence[int]]]:
    """The tokens in pushes of any sizes."""
    cuts = st.lists(st.integers(0, len(token_ids)), max_size=len(token_ids))
    return cuts.map(
        lambda cuts: [token_ids[first:last] for first, last in pairwise([0, *sorted(cuts), len(token_ids)])]
    )


def _pieces() -> dict[str, list]:
    """Vocabulary and merges of a BPE on words with ▁ for spaces."""
    tokenizer = Fast(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.train_from_iterator([WORDS.strip()], trainers.BpeTrainer(vocab_size=60))
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": sorted(model["vocab"], key=model["vocab"].__getitem__), "merges": model["merges"]}
