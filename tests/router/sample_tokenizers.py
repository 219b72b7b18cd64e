"""Real tokenizers of the common kinds, trained on the spot on a few words: small, but with all the traps."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from holdfast.router.text.tokenizer import Tokenizer

WORDS = "the quick brown fox jumps over the lazy dog and the hen says good morning to the other hens\n"
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]


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


def metaspace() -> Fast:
    """As in T5: the decoder drops the space of the first token."""
    tokenizer = Fast(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=[*SPECIAL_TOKENS, "<unk>"])
    tokenizer.train_from_iterator([WORDS + "äöü 日本"], trainer)
    return tokenizer


@cache
def loaded(kind: str, root: Path) -> Tokenizer:
    """The tokenizer of that kind, through a folder under `root`, as Holdfast reads it."""
    folder = root / kind
    write(folder, {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}[kind]())
    return Tokenizer.load(str(folder))


def write(folder: Path, tokenizer: Fast, **settings: object) -> None:
    """A model folder's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _pieces() -> dict[str, list]:
    """Vocabulary and merges of a BPE on words with ▁ for spaces."""
    tokenizer = Fast(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.train_from_iterator([WORDS.strip()], trainers.BpeTrainer(vocab_size=60))
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": sorted(model["vocab"], key=model["vocab"].__getitem__), "merges": model["merges"]}
