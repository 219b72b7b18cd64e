"""What scripts use of `LLM.get_tokenizer()`, against the tokenizer of transformers of the same folder."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from holdfast.cluster.offline.chat_tokenizer import ChatTokenizer
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError

BUNDLED = Path(__file__).parents[3] / "cluster/bundled_model/model"
TEXTS = ["The capital of France is", "日本 <|user|>", ""]


@pytest.fixture(scope="module")
def ours() -> Any:
    return ChatTokenizer.of(Tokenizer.load(str(BUNDLED)))


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoTokenizer.from_pretrained(BUNDLED)


@pytest.mark.parametrize(
    "name",
    [
        *("bos_token", "bos_token_id", "eos_token", "eos_token_id", "pad_token", "pad_token_id"),
        *("unk_token", "unk_token_id", "cls_token", "mask_token_id"),
    ],
)
def test_named_tokens(ours: Any, theirs: Any, name: str):
    assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("adds", [False, True])
def test_a_call_encodes(ours: Any, theirs: Any, adds: bool):
    said, told = ours(TEXTS, add_special_tokens=adds), theirs(TEXTS, add_special_tokens=adds)
    assert (said.input_ids, said["attention_mask"]) == (told.input_ids, told["attention_mask"])
    assert ours(TEXTS[0], add_special_tokens=adds).input_ids == theirs(TEXTS[0], add_special_tokens=adds).input_ids
    assert ours.encode(TEXTS[1], add_special_tokens=adds) == theirs.encode(TEXTS[1], add_special_tokens=adds)


@pytest.mark.parametrize("skips", [{}, {"skip_special_tokens": False}, {"skip_special_tokens": True}])
def test_decoding(ours: Any, theirs: Any, skips: dict[str, bool]):
    ids = [theirs.encode(text) for text in TEXTS]
    assert ours.batch_decode(ids, **skips) == theirs.batch_decode(ids, **skips)
    assert [ours.decode(one, **skips) for one in ids] == [theirs.decode(one, **skips) for one in ids]
    assert ours.decode(5, **skips) == theirs.decode(5, **skips)


def test_names_of_tokens(ours: Any, theirs: Any):
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.tokenize(TEXTS[0]) == theirs.tokenize(TEXTS[0])
    assert ours.convert_ids_to_tokens([5, 600]) == theirs.convert_ids_to_tokens([5, 600])
    assert ours.convert_ids_to_tokens(4) == theirs.convert_ids_to_tokens(4)
    for tokens in ("<|user|>", ["<|end|>", "the"], "no such token"):
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    assert {"<|end|>", "<|user|>"} <= set(ours.all_special_tokens)


def test_what_is_not_supported_is_refused_by_name(ours: Any):
    assert ours("a", padding=False, return_tensors=None).input_ids == ours.encode("a")
    with pytest.raises(InvalidRequestError, match=r"^return_tensors = "):
        ours("a", return_tensors="pt")
    with pytest.raises(TypeError, match="'nonsense'"):
        ours("a", nonsense=1)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ours.nonsense
    assert ours
