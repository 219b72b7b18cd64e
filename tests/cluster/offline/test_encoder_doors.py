"""Encoders over HTTP and gRPC: classes, scores, ranks and vectors are Hugging Face's, in the shapes of vLLM, Jina,
Cohere and OpenAI.
"""

import base64

import numpy as np
import openai
import pytest
import torch

from holdfast import LLM, Client
from holdfast.worker.errors import InvalidRequestError
from tests.cluster.offline.doors import grpc_of, http_of
from tests.cluster.offline.test_encoders import DOCUMENTS, LONG, QUERY, write_tokenizer
from tests.parity.test_pooling import save_pooled

LABELS = ["bad", "fair", "good"]
NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {name: at for at, name in enumerate(LABELS)}}
TEXTS = ["a cat sat on the mat", "", "two [SEP] plus [SEP] two", "\u0000 caf\u00e9 \U0001f600\ufffd", f"{LONG} " * 5]


def saved(folder, family, architecture="AutoModel", **changes):
    """The model in Hugging Face's hands, and its tokenizer."""
    import transformers

    save_pooled(folder, family, architecture, **changes)
    tokenizer = write_tokenizer(folder, "bert")
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def outputs(model, tokenizer, texts, others=None):
    """Logits, or states, of each text or pair; long ones are cut."""
    found = []
    for number, text in enumerate(texts):
        second = None if others is None else [others[number]]
        encoded = tokenizer([text], second, truncation=True, max_length=128, return_tensors="pt")
        with torch.inference_mode():
            found.append(model(**encoded)[0][0])
    return found


def close(found, expected):
    np.testing.assert_allclose(np.array(found), np.array([one.numpy() for one in expected]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_classes(family, tmp_path):
    model, tokenizer = saved(tmp_path, family, "AutoModelForSequenceClassification", num_labels=3, **NAMES)
    expected = [logits.softmax(-1) for logits in outputs(model, tokenizer, TEXTS)]
    cut = {"truncate_prompt_tokens": -1}
    with LLM(str(tmp_path), num_threads=1) as llm, http_of(llm) as http, grpc_of(llm) as address:
        for path in ("/classify", "/v1/classify"):
            data = http.post(path, json={"input": TEXTS, **cut}).json()["data"]
            close([one["probs"] for one in data], expected)
            assert [one["label"] for one in data] == [LABELS[int(one.argmax())] for one in expected]
        ids = [tokenizer(text)["input_ids"] for text in TEXTS[:4]]
        data = http.post("/v1/classify", json={"input": ids}).json()["data"]
        close([one["probs"] for one in data], expected[:4])
        with Client(address) as client:
            answer = client.pool(TEXTS, **cut)
            assert answer.labels == tuple(LABELS)
            close([one.values for one in answer.outputs], expected)
            close([one.values for one in client.pool(ids).outputs], expected[:4])
            with pytest.raises(InvalidRequestError, match="has 3 labels"):
                client.score(QUERY, DOCUMENTS)
        assert http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS}).status_code == 400
        assert http.post("/v1/embeddings", json={"input": "a"}).json()["error"]["param"] == "model"


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_scores_and_ranks(family, tmp_path):
    model, tokenizer = saved(tmp_path, family, "AutoModelForSequenceClassification", num_labels=1)
    query = f"{QUERY} [SEP] cat"
    expected = [logits.sigmoid()[0] for logits in outputs(model, tokenizer, [query] * len(TEXTS), TEXTS)]
    order = sorted(range(len(TEXTS)), key=lambda at: -float(expected[at]))
    cut = {"truncate_prompt_tokens": -1}
    with LLM(str(tmp_path), num_threads=1) as llm, http_of(llm) as http, grpc_of(llm) as address:
        for path in ("/score", "/v1/score"):
            data = http.post(path, json={"text_1": query, "text_2": TEXTS, **cut}).json()["data"]
            close([one["score"] for one in data], expected)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = {"query": query, "documents": [{"text": text} for text in TEXTS], "top_n": 3, **cut}
            results = http.post(path, json=body).json()["results"]
            assert [one["index"] for one in results] == order[:3]
            close([one["relevance_score"] for one in results], [expected[at] for at in order[:3]])
        with Client(address) as client:
            close(client.score(query, TEXTS, **cut), expected)
            close(client.score([query] * len(TEXTS), TEXTS, **cut), expected)
        answer = http.post("/rerank", json={"query": query, "documents": TEXTS[:1] * 2048})
        assert len({one["relevance_score"] for one in answer.json()["results"]}) == 1
        error = http.post("/v1/rerank", json={"query": query, "documents": TEXTS}).json()["error"]
        assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_vectors(family, tmp_path):
    model, tokenizer = saved(tmp_path, family)
    expected = [torch.nn.functional.normalize(states.mean(0), dim=0) for states in outputs(model, tokenizer, TEXTS)]
    with LLM(str(tmp_path), pooling_type="mean", num_threads=1) as llm, http_of(llm) as http, grpc_of(llm) as address:
        with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
            for encoding in ("float", "base64"):
                more = {"encoding_format": encoding, "extra_body": {"truncate_prompt_tokens": -1}}
                data = client.embeddings.create(model="", input=TEXTS, **more).data
                found = [
                    np.frombuffer(base64.b64decode(one.embedding), "<f4") if encoding == "base64" else one.embedding
                    for one in data
                ]
                close(found, expected)
            with pytest.raises(openai.BadRequestError, match="dimensions"):
                client.embeddings.create(model="", input="a", dimensions=8)
        with Client(address) as client:
            close([one.values for one in client.pool(TEXTS, truncate_prompt_tokens=-1).outputs], expected)
        data = http.post("/v1/embeddings", json={"input": ["a"] * 2048}).json()["data"]
        assert len({tuple(one["embedding"]) for one in data}) == 1
