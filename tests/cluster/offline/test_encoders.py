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


def test_a_long_text_is_cut_between_the_tokens_around_it(reranker):
    llm, model, tokenizer = reranker
    with pytest.raises(InvalidRequestError, match="maximum context length is 24 tokens"):
        llm.classify(LONG)
    found = llm.classify(LONG, truncate_prompt_tokens=-1)[0]
    tokenizer.truncation_side = "left"
    encoded = tokenizer(LONG, truncation=True, max_length=24, return_tensors="pt")
    assert found.prompt_token_ids == encoded["input_ids"][0].tolist()
    assert found.outputs.probs == pytest.approx([probability(model, encoded)], abs=1e-6)


def test_every_encoder_is_named_where_another_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet", "architectures": ["MPNetModel"]}))
    (tmp_path / "model.safetensors").write_bytes(np.array([2], "<u8").tobytes() + b"{}")
    with pytest.raises(Exception, match=", ".join(sorted(ENCODERS))):
        LLM(str(tmp_path))
