"""Vectors and scores of `LLM` and of the HTTP API: one model behind both, in the shapes of OpenAI, vLLM and Jina."""

import asyncio
import base64
import io
import json
import sys

import numpy as np
import openai
import pytest

from holdfast import LLM, Client, LoRARequest, PoolingParams
from holdfast.cluster.commands.cli import run
from holdfast.router.api.grpc.pooling import PoolingCalls
from holdfast.router.api.intake import DecodeWorker
from holdfast.router.wire.pooling_codec import pool_request
from holdfast.v1 import inference_pb2
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import HoldfastError, InvalidRequestError
from holdfast.worker.models.pooling import Pooler
from tests.cluster.offline.doors import grpc_of, http_of
from tests.worker.models.adapter_folders import merge, save_adapter

TEXTS = ["hello", "a cat sat on the mat", "the quick brown fox jumps over the lazy dog"]
SETTINGS = {"dtype": "float32", "num_threads": 1, "num_blocks": 64, "max_num_batched_tokens": 40}


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), runner="pooling", hf_overrides={"is_matryoshka": True}, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def http(llm):
    with http_of(llm) as client:
        yield client


@pytest.fixture(scope="module")
def address(llm):
    """Of the gRPC API."""
    with grpc_of(llm) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with Client(address) as client:
        yield client


@pytest.fixture(scope="module")
def vectors(llm):
    return [one.outputs.embedding for one in llm.embed(TEXTS)]


def test_vectors_are_of_length_one_and_the_same_alone(llm, vectors):
    for text, vector in zip(TEXTS, vectors, strict=True):
        (alone,) = llm.embed(text)
        assert alone.outputs.embedding == vector
        assert alone.prompt_token_ids == llm.get_tokenizer().encode(text)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    whole = llm.embed(TEXTS, PoolingParams(use_activation=False))
    assert np.linalg.norm(whole[0].outputs.embedding) > 2
    assert len(llm.embed(TEXTS[0], PoolingParams(dimensions=7))[0].outputs.embedding) == 7


def test_what_a_model_does_not_give_is_refused(llm, tiny_model, http):
    for call, words in (
        (lambda: llm.generate("hello"), "gives vectors"),
        (lambda: llm.classify("hello"), "gives vectors, no scores of labels"),
        (lambda: llm.embed("x" * 400), "maximum context length is 256 tokens"),
        (lambda: llm.embed("x", PoolingParams(dimensions=65)), "dimensions = 65: must be at least 1, and at most 64"),
        (lambda: llm.score(["a", "b"], ["c"]), "must be one, or one per document: 1"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            call()
    assert len(llm.embed("x" * 400, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 256
    assert "gives vectors" in http.post("/v1/completions", json={"prompt": "hello"}).json()["error"]["message"]
    error = http.post("/v1/classify", json={"input": "hello"}).json()["error"]
    assert error["param"] == "model"
    for body, param in (({"input": []}, "input"), ({"input": "a", "dimensions": 65}, "dimensions")):
        answer = http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = http.post("/rerank", json={"query": "a", "documents": ["b"] * 2049})
    assert "1 to 2048" in answer.json()["error"]["message"]


def test_fields_of_other_servers_are_read_or_refused_by_name(llm, http, vectors):
    """Jina's and Cohere's `truncate`, vLLM's `items` and `task`; errors name the fields as the body does."""
    text = "".join(map(chr, range(97, 123))) * 12
    for truncate, part in ((True, text[:256]), ("END", text[:256]), ("START", text[-256:])):
        found = http.post("/v1/embeddings", json={"input": text, "truncate": truncate}).json()["data"][0]
        assert np.float32(found["embedding"]).tolist() == llm.embed(part)[0].outputs.embedding
    (item,) = http.post("/score", json={"queries": TEXTS[0], "items": TEXTS[:1]}).json()["data"]
    assert item["score"] == pytest.approx(1)
    (numbers,) = http.post("/pooling", json={"input": TEXTS[0], "task": "embed"}).json()["data"]
    assert np.float32(numbers["data"]).tolist() == vectors[0]
    for path, body, param in (
        ("/v1/embeddings", {"input": text, "truncate": False}, "input"),
        ("/v1/embeddings", {"input": text, "truncate": "NONE"}, "input"),
        ("/v1/embeddings", {"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/v1/embeddings", {"input": "a", "late_chunking": True}, "late_chunking"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
        ("/rerank", {"query": "a", "documents": [text]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 4}, "max_chunks_per_doc"),
        ("/score", {"text_1": "a", "text_2": [text]}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, body)
    body = {"query": text, "documents": [text], "max_tokens_per_doc": 7, "max_tokens_per_query": 9}
    (best,) = http.post("/v2/rerank", json=body).json()["results"]
    assert best["relevance_score"] == llm.score(text[:9], text[:7])[0].outputs.score
    assert best["document"] == {"text": text}
    body |= {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}
    assert http.post("/rerank", json=body).status_code == 200


@pytest.fixture
def ended(tmp_path, tiny_model):
    """The model with a tokenizer that adds tokens around a text, of which the last one's state is the vector."""
    from tokenizers import Tokenizer, processors

    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(tiny_model / name)
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    special = [("<pad>", 257), ("<eos>", 256)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<pad> $A <eos>", special_tokens=special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_decoder_keeps_the_tokens_around_a_text_that_is_cut(ended):
    """As Hugging Face's tokenizers do: without its end, a vector of the last token would be that of another one."""
    from transformers import AutoTokenizer

    text = "the quick brown fox jumps over the lazy dog " * 8
    with LLM(str(ended), runner="pooling", **SETTINGS) as llm:
        for most, side in ((-1, "right"), (12, "right"), (12, "left")):
            tokenizer = AutoTokenizer.from_pretrained(ended, truncation_side=side)
            expected = tokenizer(text, truncation=True, max_length=256 if most == -1 else most)["input_ids"]
            (cut,) = llm.embed(text, truncate_prompt_tokens=most, truncation_side=side)
            assert cut.prompt_token_ids == expected
            assert (expected[0], expected[-1]) == (257, 256)
            (whole,) = llm.embed([expected])
            assert cut.outputs.embedding == whole.outputs.embedding


def test_every_door_cuts_the_same_side(llm, http, client):
    """The end of a text, unless the left side is asked for."""
    text = "".join(map(chr, range(97, 123)))
    first, last = ([one.outputs.embedding for one in llm.embed(part)] for part in (text[:9], text[-9:]))
    for side, expected in ((None, first), ("right", first), ("left", last)):
        asked = {"truncate_prompt_tokens": 9, "truncation_side": side}
        assert [one.outputs.embedding for one in llm.embed(text, **asked)] == expected
        assert [list(one.values) for one in client.pool([text], **asked).outputs] == expected
        found = http.post("/v1/embeddings", json={"input": text, **asked}).json()["data"]
        assert [np.float32(one["embedding"]).tolist() for one in found] == expected
        ours, theirs = llm.score(text, text[:9], **asked)[0].outputs.score, client.score(text, text[:9], **asked)
        assert theirs == [ours]
        assert (ours > 1 - 1e-6) == (side != "left")
    options = inference_pb2.PoolingOptions(truncate_left=True, truncate_right=True)
    with pytest.raises(InvalidRequestError, match="truncate_left"):
        pool_request(inference_pb2.PoolRequest(inputs=[{"text": text}], options=options))


def test_openai_sdk_gets_the_same_vectors(http, vectors):
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model="", input=TEXTS, **encoding)
            for one, vector in zip(answer.data, vectors, strict=True):
                found = one.embedding
                if isinstance(found, str):
                    found = np.frombuffer(base64.b64decode(found), dtype="<f4").tolist()
                assert np.float32(found).tolist() == vector
        assert answer.usage.prompt_tokens == sum(map(len, TEXTS))
        one = client.embeddings.create(model="", input=list(TEXTS[0].encode()), dimensions=8)
        assert np.linalg.norm(one.data[0].embedding) == pytest.approx(1, abs=1e-6)
        assert len(one.data[0].embedding) == 8


def test_scores_of_vectors_are_their_cosines(llm, http, vectors):
    expected = [float(np.dot(vectors[0], one)) for one in vectors]
    ours = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)]
    assert ours == pytest.approx(expected, abs=1e-6)
    for path, names in (("/score", ("text_1", "text_2")), ("/v1/score", ("queries", "documents"))):
        answer = http.post(path, json=dict(zip(names, (TEXTS[0], TEXTS), strict=True))).json()
        assert [one["score"] for one in answer["data"]] == ours
    order = sorted(range(3), key=lambda at: -ours[at])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = http.post(path, json={"query": TEXTS[0], "documents": TEXTS, "top_n": 2}).json()
        assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
            (at, ours[at]) for at in order[:2]
        ]
        assert answer["results"][0]["document"] == {"text": TEXTS[order[0]]}


def test_grpc_gets_the_same_vectors_and_scores(llm, client, vectors):
    found = client.pool([*TEXTS, llm.get_tokenizer().encode(TEXTS[0])])
    assert [list(one.values) for one in found.outputs] == [*vectors, vectors[0]]
    assert [one.num_prompt_tokens for one in found.outputs] == [*map(len, TEXTS), len(TEXTS[0])]
    assert (found.model, found.labels) == (llm.engine.info.model, ())
    (cut,) = client.pool(TEXTS[:1], PoolingParams(dimensions=7)).outputs
    assert list(cut.values) == llm.embed(TEXTS[0], PoolingParams(dimensions=7))[0].outputs.embedding
    (raw,) = client.pool(TEXTS[:1], PoolingParams(use_activation=False)).outputs
    assert np.linalg.norm(raw.values) > 2
    assert client.pool(["x" * 400], truncate_prompt_tokens=-1).outputs[0].num_prompt_tokens == 256
    assert client.score(TEXTS[0], TEXTS) == [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)]


def test_the_command_prints_the_same_vectors(tiny_model, address, vectors, capsys, monkeypatch):
    settings = ["--runner", "pooling", "--dtype", "float32", "--num-threads", "1", "--num-blocks", "64"]
    assert run(["embed", TEXTS[0], "--model", str(tiny_model), *settings]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [printed(vectors[0])]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    cut = ["embed", "a cat sat", "--server", address, "--truncate-prompt-tokens", "5", "--truncation-side"]
    for side, part in (("left", "t sat"), ("right", "a cat")):
        assert run([*cut, side]) == run(["embed", part, "--server", address]) == 0
        ours, whole = capsys.readouterr().out.splitlines()
        assert ours == whole
    assert run(["embed", "-", "--server", address]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == list(map(printed, vectors))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(["embed", "-", "--server", address]) == 2
    assert "1 to 2048" in capsys.readouterr().err


def printed(vector):
    """In nine digits, which say a float32 exactly."""
    short = [float(f"{number:.9g}") for number in vector]
    assert np.float32(short).tolist() == vector
    return short


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        (lambda client: client.pool([]), "inputs", "1 to 2048"),
        (lambda client: client.pool(["a"] * 2049), "inputs", "1 to 2048"),
        (lambda client: client.pool([""]), "inputs", "must not be empty"),
        (lambda client: client.pool([[2**32]]), r"inputs\[0\]", "must be token ids"),
        (lambda client: client.pool(["x" * 400]), "inputs", "256 tokens"),
        (lambda client: client.pool(["a"], PoolingParams(dimensions=65)), "dimensions", "at most 64"),
        (lambda client: client.pool(["a"], truncate_prompt_tokens=-2), "truncate_prompt_tokens", "-1"),
        (lambda client: client.pool(["a"], model="no-such-model"), "model", "no-such-model"),
        (lambda client: client.score(["a", "b"], ["c"]), "queries", "one per document"),
        (lambda client: client.score("a", []), "documents", "1 to 2048"),
        (lambda client: client.generate("hello"), "model", "gives vectors"),
    ],
)
def test_what_is_refused_over_grpc(client, call, field, words):
    with pytest.raises(HoldfastError, match=rf"{field}.*{words}"):
        call(client)


def test_an_answer_that_no_message_holds_is_refused_before_anything_is_computed(llm):
    calls = PoolingCalls(llm._engine._router._processor, DecodeWorker(), 2**20)
    with pytest.raises(InvalidRequestError, match="inputs = 4000: must be at most 3276 with 64 numbers each"):
        calls._check_answer(4000, 64)


def test_a_model_of_labels(tmp_path, tiny_model, http, capsys):
    import torch
    from transformers import AutoConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    labels = {0: "bad", 1: "good"}
    config = AutoConfig.from_pretrained(tiny_model, num_labels=2, id2label=labels, label2id={"bad": 0, "good": 1})
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(tiny_model / name)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = llm.classify(TEXTS)
        assert [sum(one.outputs.probs) for one in found] == pytest.approx([1, 1, 1], abs=1e-6)
        assert llm.engine.info.pooling.labels == ("bad", "good")
        assert run(["embed", TEXTS[0], "--model", str(tmp_path), "--num-blocks", "64"]) == 0
        assert json.loads(capsys.readouterr().out).keys() == {"bad", "good"}
        with pytest.raises(InvalidRequestError, match="has 2 labels"):
            llm.score("a", "b")
        with pytest.raises(InvalidRequestError, match="gives scores, no vectors"):
            llm.embed("a")


def test_vectors_with_adapters_are_those_of_the_merged_model(tmp_path, tiny_model, vectors):
    """One adapter is named as PEFT names those of a model without its head. Alone and in company the same bits."""

    def without_head(config, tensors):
        for name in list(tensors):
            tensors[name.replace(".model.model.", ".model.")] = tensors.pop(name)

    changes = (None, without_head)
    folders = [
        save_adapter(tiny_model, tmp_path / f"a{seed}", seed=seed, change=change) for seed, change in enumerate(changes)
    ]
    loras = [LoRARequest(f"a{number}", number, str(folder)) for number, folder in enumerate(folders, 1)]
    with LLM(str(tiny_model), runner="pooling", enable_lora=True, max_loras=2, **SETTINGS) as llm:
        texts, of = [text for text in TEXTS for _ in range(3)], [None, *loras] * len(TEXTS)
        company = [one.outputs.embedding for one in llm.embed(texts, lora_request=of)]
        alone = [llm.embed(text, lora_request=lora)[0].outputs.embedding for text, lora in zip(texts, of, strict=True)]
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, lora_request=loras[0])]
        assert scores == [pytest.approx(float(np.dot(company[1], one)), abs=1e-6) for one in company[1::3]]
        with pytest.raises(InvalidRequestError, match="lora_request"):
            llm.score(TEXTS[0], TEXTS, lora_request=[*loras, None])
        router = llm._engine._router
        adapter, model = Adapter.in_folder("new", str(folders[0])), llm.engine.info.model
        tried = router._processor.try_adapter(model, adapter)  # as where operators load one
        asyncio.run_coroutine_threadsafe(tried, router._loop).result(20)
    assert company == alone
    assert company[::3] == vectors
    for number in (1, 2):
        named = save_adapter(tiny_model, tmp_path / f"named{number}", seed=number - 1)
        with LLM(str(merge(tiny_model, named, tmp_path / f"merged{number}")), runner="pooling", **SETTINGS) as llm:
            merged = [one.outputs.embedding for one in llm.embed(TEXTS)]
        assert np.abs(np.subtract(company[number::3], merged)).max() < 1e-4
        assert np.abs(np.subtract(company[number::3], vectors)).max() > 1e-2


def test_the_end_of_an_engine_ends_a_call(tiny_model, monkeypatch):
    def broken(self, plan, states):
        raise RuntimeError("planted")

    monkeypatch.setattr(Pooler, "pooled", broken)
    with LLM(str(tiny_model), runner="pooling", **SETTINGS) as llm, pytest.raises(HoldfastError, match="planted"):
        llm.embed(TEXTS * 100)


def test_a_text_model_gives_no_vectors(tiny_model):
    with LLM(str(tiny_model), **SETTINGS) as llm:
        for call in (llm.embed, llm.classify, lambda text: llm.score(text, text)):
            with pytest.raises(InvalidRequestError, match="generates text: it gives neither vectors nor scores"):
                call("hello")
