"""Encoders: vectors, scores and classes are Hugging Face's, with the same bits alone, in company and on any ranks."""

import json

import pytest
import torch

from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.pooling import check_pooled
from holdfast.worker.pooling import PoolingKind, PoolingParams
from tests.parity.families import ENCODERS
from tests.parity.harness import load, on_ranks, worker_config
from tests.parity.test_pooling import PROMPTS, difference, pooled_by_hand, results, save_pooled, states_of

CLASSIFIER = "AutoModelForSequenceClassification"


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_are_those_of_hugging_face(family, tmp_path):
    folder = save_pooled(tmp_path, family)
    states = states_of(folder)
    for kind in PoolingKind:
        leader = load(worker_config(folder, pooling_type=kind.value))
        assert difference(results(leader)[0], [pooled_by_hand(one, kind) for one in states]) < 1e-6
        leader.close()


def test_without_files_that_say_more_the_first_token_is_pooled(tmp_path):
    folder = save_pooled(tmp_path, "bert")
    leader = load(worker_config(folder))
    assert difference(results(leader)[0], [pooled_by_hand(one, "cls") for one in states_of(folder)]) < 1e-6
    leader.close()


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_the_same_bits_in_any_step_and_on_any_ranks(family, tmp_path):
    """A step's budget does not cut a prompt: one that is longer has a step of its own."""
    folder = save_pooled(tmp_path, family)
    for kind in ("cls", "mean"):
        config = worker_config(folder, pooling_type=kind)
        leader = load(config)
        assert leader._runner.info.row_invariant
        alone, _ = results(leader, at_once=False)
        for most in (2048, 70, 41, 3):
            assert results(leader, max_num_batched_tokens=most)[0] == alone, most
        again, cached = results(leader, PROMPTS * 2, prefix_caching=True)
        assert again == alone * 2
        assert not any(cached)
        leader.close()
        for size in (2, 4):
            on_some = on_ranks(worker_config(folder, size, pooling_type=kind), lambda one: results(one)[0])
            assert on_some == alone, size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_half_precision(family, dtype, tmp_path):
    folder = save_pooled(tmp_path, family)
    leader = load(worker_config(folder, dtype=dtype))
    alone, _ = results(leader, at_once=False)
    assert results(leader)[0] == alone
    assert difference(alone, [pooled_by_hand(one, "cls") for one in states_of(folder)]) < 3e-2
    leader.close()


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm-roberta"])
def test_scores_of_labels_are_those_of_hugging_face(family, num_labels, tmp_path):
    folder = save_pooled(tmp_path, family, CLASSIFIER, num_labels=num_labels)
    logits = states_of(folder, architecture=CLASSIFIER)
    leader = load(worker_config(folder))
    expected = [one.sigmoid() if num_labels == 1 else one.softmax(-1) for one in logits]
    assert difference(results(leader)[0], [one.numpy() for one in expected]) < 1e-6
    plain = results(leader, params=PoolingParams(use_activation=False))[0]
    assert difference(plain, [one.numpy() for one in logits]) < 1e-5
    assert leader._runner.info.pooling.pair_template == ""
    leader.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
        {"classifier_activation": "tanh", "norm_eps": 1e-3},
    ],
)
def test_heads_of_modernbert(changes, tmp_path):
    folder = save_pooled(tmp_path, "modernbert", CLASSIFIER, num_labels=2, **changes)
    logits = states_of(folder, architecture=CLASSIFIER)
    leader = load(worker_config(folder))
    plain = results(leader, params=PoolingParams(use_activation=False))[0]
    assert difference(plain, [one.numpy() for one in logits]) < 1e-5
    leader.close()


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_the_second_text_of_a_pair_has_its_own_token_type(family, tmp_path):
    """In models that tell them apart; others are told of it in vain."""
    from transformers import AutoModelForSequenceClassification

    folder = save_pooled(tmp_path, family, CLASSIFIER, num_labels=1)
    pairs = [[3, 9, 20, 4, 30, 7, 7, 4], [3, 4, 11, 4], [3, 50, 60, 4]]
    starts = [4, 2, 0]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for pair, start in zip(pairs, starts, strict=True):
        first = start if family == "bert" and start else len(pair)
        types = torch.tensor([[0] * first + [1] * (len(pair) - first)])
        with torch.inference_mode():
            expected.append(model(torch.tensor([pair]), token_type_ids=types).logits[0].sigmoid().numpy())
    for size in (1, 2):
        config = worker_config(folder, size)
        found = on_ranks(config, lambda one: results(one, pairs, second_starts=starts)[0])
        assert difference(found, expected) < 1e-6
        without = on_ranks(config, lambda one: results(one, pairs)[0])
        assert (difference(without, expected) > 1e-4) == (family == "bert")


def test_a_template_of_the_settings(tmp_path):
    folder = save_pooled(tmp_path, "xlm-roberta", CLASSIFIER, num_labels=1)
    leader = load(worker_config(folder, score_template="{query} or {document}"))
    assert leader._runner.info.pooling.pair("a", "b", None) == "a or b"
    leader.close()


def test_names_of_old_checkpoints_and_heads_that_are_not_read(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_pooled(tmp_path, "bert", "AutoModelForPreTraining")
    states = states_of(folder)
    stored = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): values
        for name, values in stored.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(128)[None]
    save_file(old, folder / "model.safetensors")
    leader = load(worker_config(folder))
    assert difference(results(leader)[0], [pooled_by_hand(one, "cls") for one in states]) < 1e-6
    leader.close()


@pytest.mark.parametrize(
    ("entries", "settings", "words"),
    [
        ({"architectures": ["BertForTokenClassification"]}, {}, "of its architecture BertForTokenClassification"),
        ({"architectures": ["BertLMHeadModel"]}, {}, "of its architecture BertLMHeadModel"),
        ({"architectures": ["BertModel"]}, {"runner": "generate"}, "it is an encoder, which generates no text"),
    ],
)
def test_what_is_no_encoder_of_texts_is_refused_by_name(tmp_path, entries, settings, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **entries}))
    with pytest.raises(UnsupportedModelError, match=words):
        check_pooled(worker_config(tmp_path, **settings).model, tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder = True"),
        ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("modernbert", {"hidden_activation": "quick_gelu"}, "its activation is 'quick_gelu'"),
    ],
)
def test_what_no_layout_can_say_is_refused_by_name(family, changes, words, tmp_path):
    """The HF backend, which computes no encoder, is not tried."""
    folder = save_pooled(tmp_path, family)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, **changes}))
    with pytest.raises((UnsupportedModelError, ConfigurationError), match=words):
        load(worker_config(folder))


@pytest.mark.parametrize("name", ["kv_offload_disk", "enable_lora"])
def test_settings_that_an_encoder_does_not_have_are_refused_by_name(name, tmp_path):
    config = worker_config(save_pooled(tmp_path / "model", "bert"))
    if name == "enable_lora":
        config = config.model_copy(update={"model": config.model.model_copy(update={name: True})})
    else:
        cache = config.cache.model_copy(update={name: str(tmp_path)})
        config = config.model_copy(update={"cache": cache})
    with pytest.raises(ConfigurationError, match=rf"{name}\b.* must be unset"):
        load(config)


def test_an_activation_of_a_head_that_is_not_known_is_refused_by_name(tmp_path):
    folder = save_pooled(tmp_path, "modernbert", CLASSIFIER, num_labels=2, classifier_activation="relu")
    with pytest.raises(UnsupportedModelError, match="its classifier_activation is relu"):
        load(worker_config(folder))
