"""Tokenizers of GGUF files give the tokens of the tokenizer.json that they were made of."""

import json
from contextlib import suppress
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from holdfast.router.text.tokenizer import Tokenizer as Loaded
from holdfast.worker.models.formats.gguf_folder import hf_folder
from holdfast.worker.models.formats.gguf_metadata import NotUnderstood
from holdfast.worker.models.formats.gguf_tokenizer import GgufTokenizer
from tests.worker.models.formats.gguf_files import ODD, alphabet, write_model

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and doesn't stop at 12345 or 2026.",
    "Ça coûte 100 € à la fête; naïve café. 日本語 and emoji \U0001f600!",
    "def f(x):\n    return x + 1\n\n\n    # spaces   and\ttabs\r\n",
    "  two spaces, I'LL see. WE'RE here; don't THINKso CamelCase HTTPServer",
] * 4
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "a",
    "\n\n",
    "the<|im_start|>user\nhi<|im_end|>",
    "unseen: ЖЂ ∑ \U0001f4a5 <s>",
    "9" * 10,
    "e\u0301te\u0301 c'est l'e\u0301te\u0301, and हिन्दी में",
    "path/to/file.py\n\n//x = y['z'];\r\n 12345.678 don'T WE'LLgo HTTPServerError",
    "漢字かな交じり文カタカナ123と456 mixed漢字text",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def split_by(*patterns: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": DIGITS,
    "command-r": DIGITS,
    "llama-bpe": split_by(LLAMA3),
    "glm4": split_by(LLAMA3),
    "qwen2": split_by(QWEN2),
    "qwen35": split_by(QWEN35),
    "gpt-4o": split_by(GPT_4O),
    "tekken": split_by(TEKKEN),
    "seed-coder": split_by(SEED),
    "kimi-k2": split_by(KIMI),
    "deepseek-v3": split_by(*DEEPSEEK_V3),
}
COMPOSED = ("qwen2", "qwen35", "command-r", "olmo")
WHOLE_WORDS = ("llama-bpe", "tekken", "kimi-k2")


def byte_level(pre: str) -> Tokenizer:
    """As a model's own tokenizer.json has it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet(), special_tokens=SPECIAL)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    before = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))])
    words = [word for text in CORPUS for word in text.split()]
    tokenizer.train_from_iterator(words if prefix else [f" {word}" for word in words], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(content))


def metadata_of(tokenizer: Tokenizer, **fields: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [3 if text in SPECIAL else 6 if text.startswith("<0x") else 1 for text in tokens]
    kinds[ids["<unk>"]] = 2 if fields.get("model") == "llama" else 3
    found = {"tokens": tokens, "token_type": kinds, "bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    found |= {"unknown_token_id": ids["<unk>"], **fields}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def merges_of(tokenizer: Tokenizer) -> list[str]:
    return [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def assert_same(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        for skip in (False, True):
            assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokenizers(pre):
    theirs = byte_level(pre)
    metadata = metadata_of(theirs, model="gpt2", pre=pre, merges=merges_of(theirs))
    assert_same(GgufTokenizer(metadata, "llama").tokenizer, theirs)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers(prefix):
    theirs = sentencepiece(prefix)
    ranks = {"".join(merge): rank for rank, merge in enumerate(json.loads(theirs.to_str())["model"]["merges"])}
    ids = theirs.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    scores = [-float(ranks.get(text, 10_000)) for text in tokens]
    metadata = metadata_of(theirs, model="llama", scores=scores, add_space_prefix=prefix)
    assert_same(GgufTokenizer(metadata, "llama").tokenizer, theirs)


def test_a_tokenizer_with_spaces_and_merges():
    """Gemma 4's: tokens as in SentencePiece, and merges in their own order."""
    theirs = sentencepiece(prefix=False)
    metadata = metadata_of(theirs, model="gemma4", merges=merges_of(theirs), add_space_prefix=False)
    assert_same(GgufTokenizer(metadata, "gemma4").tokenizer, theirs)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, ["<s>"]),
        ({"pre": "llama-bpe"}, ["<s>"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
    ],
)
def test_a_text_begins_with_what_the_file_says(fields, expected):
    theirs = byte_level("gpt-2")
    metadata = metadata_of(theirs, **{"model": "gpt2", "pre": "gpt-2", "merges": merges_of(theirs), **fields})
    ours = GgufTokenizer(metadata, "llama").tokenizer
    found = ours.encode("the").tokens
    assert found[: len(found) - len(ours.encode("the", add_special_tokens=False).ids)] == expected


def test_tokens_that_only_fill_the_table_up_are_none():
    theirs = byte_level("gpt-2")
    metadata = metadata_of(theirs, model="gpt2", pre="gpt-2", merges=merges_of(theirs))
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], f"[PAD{count}]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 5]
    ours = GgufTokenizer(metadata, "llama").tokenizer
    assert ours.get_vocab_size() == count
    assert ours.decode([count]) == ""


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, ["</s>", "<|im_end|>"]), ({"eot_token_id": 1}, ["</s>", "<s>"]), ({"eom_token_id": 3}, None)],
)
def test_the_tokens_that_end_an_answer(fields, expected):
    theirs = byte_level("gpt-2")
    ids = theirs.get_vocab()
    metadata = metadata_of(theirs, model="gpt2", pre="gpt-2", merges=merges_of(theirs), **fields)
    found = GgufTokenizer(metadata, "llama").files()["generation_config.json"]["eos_token_id"]
    assert found == [ids[text] for text in expected or ["</s>", "<|im_start|>", "<|im_end|>"]]


def test_several_chat_templates_have_names(tmp_path):
    fields = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    tokenizer = Loaded.load(str(hf_folder(write_model("qwen2", tmp_path, fields=fields).file, "model")))
    assert tokenizer.template_of(has_tools=True) == "{{ tools }}"
    assert tokenizer.template_of() == tokenizer.chat_template != "{{ tools }}"


def test_a_file_s_tokenizer_and_chat_template_are_loaded(tmp_path):
    written = write_model("llama", tmp_path, "Q8_0")
    tokenizer = Loaded.load(str(hf_folder(written.file, "model")))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.chat_template.startswith("{% for message in messages %}")
    assert tokenizer.decode(tokenizer.encode("tt")) == "tt"


def test_gpt_oss_s_messages_end_no_answer():
    """Each message of an answer ends with `<|end|>`; the answer ends with `<|return|>` or a call."""
    theirs = byte_level("gpt-4o")
    metadata = metadata_of(theirs, model="gpt2", pre="gpt-4o", merges=merges_of(theirs))
    tokens, added = metadata["tokenizer.ggml.tokens"], ["<|end|>", "<|return|>", "<|call|>"]
    metadata["tokenizer.ggml.tokens"] = [*tokens, *added]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 3, 3]
    metadata["tokenizer.ggml.eos_token_id"] = len(tokens) + 1
    found = GgufTokenizer(metadata, "gpt-oss").files()["generation_config.json"]["eos_token_id"]
    assert found == [len(tokens) + 1, len(tokens) + 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": []}, "has no merges of tokens"),
        ({"pre": "of-tomorrow"}, "names a pre-tokenizer 'of-tomorrow', which is not known"),
    ],
)
def test_a_byte_level_tokenizer_that_lacks_something_is_refused(change, message):
    theirs = byte_level("gpt-2")
    metadata = metadata_of(theirs, **{"model": "gpt2", "pre": "gpt-2", "merges": merges_of(theirs), **change})
    with pytest.raises(NotUnderstood, match=message):
        GgufTokenizer(metadata, "llama")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma4"])
def test_odd_metadata_are_refused_or_read(kind):
    """Each key with another value in turn, and without one: no other error comes up."""
    if kind == "gpt2":
        theirs = byte_level("llama-bpe")
        metadata = metadata_of(theirs, model=kind, pre="llama-bpe", merges=merges_of(theirs))
    else:
        theirs = sentencepiece(prefix=True)
        count = len(theirs.get_vocab())
        metadata = metadata_of(theirs, model=kind, scores=[0.0] * count, merges=merges_of(theirs))
    metadata |= {"tokenizer.chat_template": "{{ x }}", "tokenizer.chat_templates": ["tool"]}
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 3}
    for key in metadata:
        changed = [metadata | {key: value} for value in ODD]
        changed.append({name: value for name, value in metadata.items() if name != key})
        for odd in changed:
            with suppress(NotUnderstood):
                tokenizer = GgufTokenizer(odd, "llama")
                json.dumps(tokenizer.files())
                tokenizer.tokenizer.to_str()
