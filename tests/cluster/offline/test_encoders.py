"""Encoders offline: texts, long texts and pairs of texts are read as Hugging Face's tokenizers read them."""

import json

import numpy as np
import pytest
import torch

from holdfast import LLM
from holdfast.worker.errors import InvalidRequestError
from tests.parity.families import ENCODERS
from tests.parity.test_pooling import save_pooled

WORDS = ["a", "cat", "sat", "on", "the", "mat", "two", "plus", "is", "four", "query", "about", "cats", "dogs"]
SPECIAL = {"bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]"), "xlm-roberta": ("<s>", "<pad>", "</s>", "<unk>")}
QUERY, DOCUMENTS = "about cats", ["a cat sat on the mat", "two plus two is four", "dogs"]
LONG = " ".join(WORDS * 3)


def write_tokenizer(folder, family):
    """A tokenizer of words, and the same in Hugging Face's hands."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = SPECIAL[family]
    vocabulary = {token: number for number, token in enumerate([*special, *WORDS])}
    is_bert = family == "bert"
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]" if is_bert else "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    begin, end = ("[CLS]", "[SEP]") if is_bert else ("<s>", "</s>")
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if is_bert else "<s> $A </s> </s> $B </s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=pair, special_tokens=[(token, vocabulary[token]) for token in (begin, end)]
    )
    pad, unknown = ("[PAD]", "[UNK]") if is_bert else ("<pad>", "<unk>")
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if is_bert else [])]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token=begin,
        sep_token=end,
        pad_token=pad,
        unk_token=unknown,
        model_input_names=names,
    )
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module", params=SPECIAL)
def reranker(request, tmp_path_factory):
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("reranker")
    positions = {"max_position_embeddings": 24} if request.param == "bert" else {"max_position_embeddings": 26}
    save_pooled(folder, request.param, "AutoModelForSequenceClassification", num_labels=1, **positions)
    tokenizer = write_tokenizer(folder, request.param)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(str(folder))
    yield llm, model, tokenizer
    llm.close()


def probability(model, encoded):
    with torch.inference_mode():
        return float(model(**encoded).logits.sigmoid())


def test_scores_of_pairs_are_those_of_hugging_face(reranker):
    llm, model, tokenizer = reranker
    found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS)]
    encoded = [tokenizer(QUERY, document, return_tensors="pt") for document in DOCUMENTS]
    assert found == pytest.approx([probability(model, one) for one in encoded], abs=1e-6)
    assert llm.score([QUERY] * 3, DOCUMENTS)[2].outputs.score == found[2]


def test_separators_in_a_text_and_empty_texts_are_read_as_hugging_face_reads_them(reranker):
    """A separator that is written in a text begins no second text: BERT's token types tell where that begins."""
    llm, model, tokenizer = reranker
    one, marks = tokenizer.sep_token, f"{tokenizer.cls_token} cat {tokenizer.sep_token}"
    pairs = [
        (f"about {one} cats", f"a {one} {one} mat"),
        (one, one),
        ("", "cat"),
        ("cat", ""),
        ("", ""),
        (marks, marks),
        (" cat ", "\n\tcat  sat\u00a0\x00\ufffd"),
    ]
    encoded = [tokenizer([query], [document], return_tensors="pt") for query, document in pairs]
    found = llm.score(*map(list, zip(*pairs, strict=True)))
    assert [found.prompt_token_ids for found in found] == [one["input_ids"][0].tolist() for one in encoded]
    expected = [probability(model, one) for one in encoded]
    assert [one.outputs.score for one in found] == pytest.approx(expected, abs=1e-6)
    alone = [tokenizer(text, return_tensors="pt") for text, _ in pairs]
    probs = [one.outputs.probs[0] for one in llm.classify([text for text, _ in pairs])]
    assert probs == pytest.approx([probability(model, one) for one in alone], abs=1e-6)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [-1, 4, 5, 8, 13, 23])
def test_a_pair_that_is_too_long_is_cut_as_hugging_face_cuts_it(reranker, most, side):
    """The longer text first: a query stays, and the tokens around both texts."""
    llm, model, tokenizer = reranker
    tokenizer.truncation_side = side
    queries, documents = [QUERY, LONG, LONG, "", "cats"], [LONG, QUERY, LONG + " a", LONG, "dogs"]
    cut = {"truncation": True, "max_length": 24 if most == -1 else most}
    encoded = [tokenizer([a], [b], return_tensors="pt", **cut) for a, b in zip(queries, documents, strict=True)]
    found = llm.score(queries, documents, truncate_prompt_tokens=most, truncation_side=side)
    assert [one.prompt_token_ids for one in found] == [one["input_ids"][0].tolist() for one in encoded]
    expected = [probability(model, one) for one in encoded]
    assert [one.outputs.score for one in found] == pytest.approx(expected, abs=1e-6)
    tokenizer.truncation_side = "right"


def test_pairs_that_do_not_fit_are_refused(reranker):
    llm, _, tokenizer = reranker
    around = tokenizer.num_special_tokens_to_add(pair=True)
    with pytest.raises(InvalidRequestError, match="maximum context length is 24 tokens; the prompt has"):
        llm.score(QUERY, LONG)
    with pytest.raises(InvalidRequestError, match=f"must be at least {around}: so many tokens are around two texts"):
        llm.score(QUERY, LONG, truncate_prompt_tokens=around - 1)
    with pytest.raises(InvalidRequestError, match="valid Unicode"):
        llm.score(QUERY, "\ud800")


def test_a_long_text_is_cut_between_the_tokens_around_it(reranker):
    llm, model, tokenizer = reranker
    with pytest.raises(InvalidRequestError, match="maximum context length is 24 tokens"):
        llm.classify(LONG)
    for number, side in ((-1, None), (-1, "left"), (9, "right"), (9, "left"), (2, None)):
        tokenizer.truncation_side = side or "right"
        most = 24 if number == -1 else number
        encoded = tokenizer(LONG, truncation=True, max_length=most, return_tensors="pt")
        for given in (
            {"truncate_prompt_tokens": number, "truncation_side": side},
            {"tokenization_kwargs": {"truncate_prompt_tokens": number, "truncation_side": side}},
            {"tokenization_kwargs": {"truncation": True, "max_length": most, "truncation_side": side}},
        ):
            (found,) = llm.classify(LONG, **given)
            assert found.prompt_token_ids == encoded["input_ids"][0].tolist()
            assert found.outputs.probs == pytest.approx([probability(model, encoded)], abs=1e-6)
    tokenizer.truncation_side = "right"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"truncation_side": "middle"}, InvalidRequestError, "truncation_side = 'middle': must be left or right"),
        ({"truncate_prompt_tokens": 0}, InvalidRequestError, "truncate_prompt_tokens = 0"),
        ({"tokenization_kwargs": {"padding": True}}, InvalidRequestError, "tokenization_kwargs = .*padding"),
        ({"tokenization_kwargs": {"max_length": 7}}, InvalidRequestError, "tokenization_kwargs = .*max_length"),
        ({"truncation": True}, TypeError, "'truncation'"),
    ],
)
def test_options_that_there_are_not_are_refused_by_name(reranker, options, error, words):
    llm = reranker[0]
    for call in (llm.classify, lambda text, **given: llm.score(text, text, **given)):
        with pytest.raises(error, match=words):
            call("a cat", **options)


def test_no_texts_have_no_results(reranker):
    assert reranker[0].classify([]) == []


def test_every_encoder_is_named_where_another_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet", "architectures": ["MPNetModel"]}))
    (tmp_path / "model.safetensors").write_bytes(np.array([2], "<u8").tobytes() + b"{}")
    with pytest.raises(Exception, match=", ".join(sorted(ENCODERS))):
        LLM(str(tmp_path))
