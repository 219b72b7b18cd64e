"""Pooled models: vectors and scores are Hugging Face's, with the same bits alone, in company, in chunks, on ranks."""

import json

import numpy as np
import pytest
import torch

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.errors import ConfigurationError, InvalidRequestError, UnsupportedModelError
from holdfast.worker.models.pooling import Pooler, check_pooled, load_pooler
from holdfast.worker.pooling import PoolingKind, PoolingParams
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.parity.families import randomize, settings_of
from tests.parity.harness import load, on_ranks, worker_config

PROMPTS = [[7, 3, 99, 120], [5], list(range(3, 61)), [9, 8, 44, 17, 100, 23, 6], list(range(60, 20, -1))]
FAMILIES = ("gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3")


def save_pooled(folder, family, architecture="AutoModel", **changes):
    """A random model without a head for tokens."""
    import transformers

    model_type, values = settings_of(family)
    values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    config = transformers.AutoConfig.for_model(model_type, **values)
    model = getattr(transformers, architecture).from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    return folder


def states_of(folder, prompts=PROMPTS, architecture="AutoModel"):
    import transformers

    model = getattr(transformers, architecture).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        found = [model.eval()(torch.tensor([prompt])) for prompt in prompts]
    return [one.last_hidden_state[0] if hasattr(one, "last_hidden_state") else one.logits[0] for one in found]


def pooled_by_hand(states, kind):
    """The reference: what sentence-transformers makes of the states of one text."""
    rows = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}
    return torch.nn.functional.normalize(rows[kind], dim=-1).numpy()


def results(
    leader,
    prompts=PROMPTS,
    params=None,
    max_num_batched_tokens=2048,
    prefix_caching=False,
    at_once=True,
    second_starts=(),
):
    """Results of prompts as float32 bytes, and how many tokens of each were cached."""
    info = leader._runner.info
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8),
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        prefix_caching=prefix_caching,
        window=info.window,
        pooling=info.pooling.kind,
        whole_prompts=info.computes_whole_prompts,
    )
    found = {}
    waiting = [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling_params=SamplingParams(seed=0),
            pooling=params or PoolingParams(),
            second_start=second_starts[number] if second_starts else 0,
        )
        for number, prompt in enumerate(prompts)
    ]
    groups = [waiting] if at_once else [[one] for one in waiting]
    for group in groups:
        for request in group:
            scheduler.add(request)
        while (plan := scheduler.plan()) is not None:
            for delta in scheduler.commit(plan, leader.run(plan)):
                found[int(delta.attempt)] = delta.pooled, delta.num_cached_tokens
            scheduler.check_integrity()
    return [found[number][0] for number in range(len(prompts))], [found[number][1] for number in range(len(prompts))]


def numbers(pooled):
    return np.frombuffer(pooled, dtype="<f4")


def difference(ours, theirs):
    return max(float(np.abs(numbers(a) - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_hugging_face(family, tmp_path):
    folder = save_pooled(tmp_path, family)
    states = states_of(folder)
    for kind in ("last", "mean"):
        leader = load(worker_config(folder, pooling_type=kind))
        ours, _ = results(leader)
        assert difference(ours, [pooled_by_hand(one, kind) for one in states]) < 1e-5
        leader.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pooled(tmp_path_factory.mktemp("pooled"), "qwen3")


@pytest.mark.parametrize(
    "kind", [PoolingKind.MEAN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in PoolingKind if kind != "mean")]
)
def test_the_same_bits_in_any_batch_chunk_and_on_any_ranks(folder, kind):
    config = worker_config(folder, pooling_type=kind.value)
    leader = load(config)
    alone, _ = results(leader, at_once=False)
    for most in (2048, 13, 3):
        assert results(leader, max_num_batched_tokens=most)[0] == alone, most
    assert results(leader, [*reversed(PROMPTS)], max_num_batched_tokens=20)[0] == alone[::-1]
    leader.close()
    for size in (2, 4):
        on_some = on_ranks(
            worker_config(folder, size, pooling_type=kind.value),
            lambda one: [results(one)[0], results(one, max_num_batched_tokens=7)[0]],
        )
        assert on_some == [alone, alone], size


def test_cached_prefixes_change_no_bit_and_a_mean_uses_none(folder):
    longer = [PROMPTS[2], [*PROMPTS[2][:40], 7, 7]]
    for kind, is_used in (("last", True), ("mean", False), ("cls", False)):
        leader = load(worker_config(folder, pooling_type=kind))
        fresh, _ = results(leader, longer, at_once=False)
        again, cached = results(leader, longer * 2, prefix_caching=True, at_once=False)
        assert again == fresh * 2
        assert bool(cached[1] and cached[2]) == is_used
        leader.close()


def test_planted_mistakes_are_seen(folder, monkeypatch):
    """Pooling over padding, of the wrong token, without normalization, of a neighbour's row."""
    expected = {kind: [pooled_by_hand(one, kind) for one in states_of(folder)] for kind in ("last", "mean")}
    result = Pooler._result
    total = Pooler.pooled

    def wrong_token(kind, num_tokens):
        return range(max(0, num_tokens - 2), max(1, num_tokens - 1))

    def padded(self, row, params):
        return result(self, row * 0.9 + 0.1, params)

    def not_normalized(self, row, params):
        return row

    def of_a_neighbour(self, plan, states):
        return total(self, plan, np.roll(states, 1, axis=0))

    planted = (
        (PoolingKind, "rows", wrong_token, "last"),
        (Pooler, "_result", padded, "mean"),
        (Pooler, "_result", not_normalized, "last"),
        (Pooler, "pooled", of_a_neighbour, "last"),
        (Pooler, "pooled", of_a_neighbour, "mean"),
    )
    for owner, name, mistake, kind in planted:
        leader = load(worker_config(folder, pooling_type=kind))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mistake)
            ours, _ = results(leader)
        assert difference(ours, expected[kind]) > 1e-2, mistake.__name__
        leader.close()


def test_a_row_without_finite_states_fails_alone(folder, monkeypatch):
    leader = load(worker_config(folder))
    before = Pooler.pooled

    def damaged(self, plan, states):
        return before(self, plan, np.where(np.arange(len(states))[:, None] == 1, np.nan, states).astype(np.float32))

    monkeypatch.setattr(Pooler, "pooled", damaged)
    with pytest.raises(KeyError, match="1"):
        results(leader)
    leader.close()


@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_of_labels_are_those_of_hugging_face(num_labels, tmp_path):
    name = "AutoModelForSequenceClassification"
    folder = save_pooled(tmp_path, "qwen2", name, num_labels=num_labels)
    logits = states_of(folder, architecture=name)
    leader = load(worker_config(folder))
    expected = [one.sigmoid() if num_labels == 1 else one.softmax(-1) for one in logits]
    assert difference(results(leader)[0], [one.numpy() for one in expected]) < 1e-5
    plain = results(leader, params=PoolingParams(use_activation=False))[0]
    assert difference(plain, [one.numpy() for one in logits]) < 1e-4
    assert leader._runner.info.pooling.labels == tuple(f"LABEL_{index}" for index in range(num_labels))
    leader.close()


def test_scores_of_two_tokens_are_those_of_their_logits(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_pooled(tmp_path, "qwen3", "AutoModelForCausalLM")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 4, "yes": 9}}}))
    overrides = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    leader = load(worker_config(folder, hf_overrides=overrides))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0, -1, [4, 9]] for prompt in PROMPTS]
    assert difference(results(leader)[0], [one.softmax(-1)[1:].numpy() for one in logits]) < 1e-5
    assert "<Query>: a\n<Document>: {query}<" in leader._runner.info.pooling.pair("a", "{query}", None)
    leader.close()


def test_dimensions_are_cut_and_normalized_where_the_model_says_so(folder):
    leader = load(worker_config(folder, hf_overrides={"matryoshka_dimensions": [8, 16]}))
    whole, _ = results(leader)
    cut, _ = results(leader, params=PoolingParams(dimensions=8))
    for a, b in zip(whole, cut, strict=True):
        assert numbers(b) == pytest.approx(numbers(a)[:8] / np.linalg.norm(numbers(a)[:8]), abs=1e-6)
    with pytest.raises(InvalidRequestError, match=r"dimensions = 12: must be one of 8, 16"):
        leader._runner.info.pooling.check(PoolingParams(dimensions=12))
    leader.close()


def write_modules(folder, *modules, pooling=None):
    """A folder as sentence-transformers writes it."""
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"x.{name}"} for at, (name, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))


def test_a_folder_says_how_it_is_pooled(folder, tmp_path):
    from safetensors.numpy import save_file

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    write_modules(tmp_path, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"))
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text('{"activation_function": "torch.nn.modules.activation.Tanh"}')
    weight, bias = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32), np.ones(5, dtype=np.float32)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 60}')
    prompts = {"default_prompt_name": "query", "prompts": {"query": "q: "}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    leader = load(worker_config(tmp_path))
    info = leader._runner.info
    assert (info.max_model_len, info.pooling.prompt, info.pooling.num_outputs) == (60, "q: ", 5)
    expected = [np.tanh(weight @ one.mean(0).numpy() + bias) for one in states_of(folder)]
    assert difference(results(leader)[0], expected) < 1e-5
    leader.close()


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        ([("Pooling", "1_Pooling")], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (
            [("Pooling", "1_Pooling")],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_cls_token, pooling_mode_mean_tokens",
        ),
        ([("Pooling", "1_Pooling")], {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
        ([("LSTM", "1_LSTM")], None, "a module LSTM"),
        ([("Dense", "2_Dense")], None, "2_Dense has no model.safetensors"),
        ([("Pooling", "../other")], None, "leads out of the folder"),
    ],
)
def test_what_is_not_pooled_here_is_refused_by_name(folder, tmp_path, modules, pooling, words):
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    write_modules(tmp_path, *modules, pooling=pooling)
    with pytest.raises((UnsupportedModelError, ConfigurationError), match=words):
        load_pooler(worker_config(tmp_path).model, tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mpnet", "architectures": ["MPNetModel"]}, "model type 'mpnet' .* it is an encoder; those of"),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "it is an encoder; those of the types bert, camem"),
        ({"model_type": "falcon", "architectures": ["FalconModel"]}, "not among the families of the native backend"),
    ],
)
def test_other_encoders_and_other_types_are_refused_by_name(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=words):
        check_pooled(worker_config(tmp_path).model, tmp_path)
