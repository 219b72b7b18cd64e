import json
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.checks import first_line
from holdfast.worker.models.model import register_attention, serving_dtype
from holdfast.worker.models.weights import (
    DummyWeights,
    build_hf_model,
    load_checkpoint,
    read_config,
    read_eos_token_ids,
    resolve_model,
)
from tests.parity.families import save_tiny_model
from tests.parity.harness import largest_difference, load, logits_in_chunks, on_ranks, worker_config

PROMPTS = [[5, 9, 77, 31, 8, 64, 3], [100, 4, 4, 90]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _attention_is_known():
    register_attention()


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [words[0].split("-") for words in lines if words[-1] == str(path)]
    return [(int(start, 16), int(end, 16)) for start, end in ends]


def test_a_folder_is_its_own_answer(llama):
    assert resolve_model(str(llama)) == llama


def test_a_hub_id_that_cannot_be_had_is_a_wrong_setting():
    with pytest.raises(ConfigurationError, match="neither a local folder nor a model that the hub would give"):
        resolve_model("some-org/some-model")


def test_a_config_that_is_not_json_is_a_wrong_setting(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"hidden_act": "nonsense"}, "its config.json names .*nonsense"),
        ({"rope_parameters": {"rope_type": "nonsense"}}, "its config.json names .*nonsense"),
        ({"vocab_size": 100}, r"weights of the checkpoint are of another shape .*by config.json \[100, 32\]"),
        ({"intermediate_size": 7}, r"6 weights .*layers.0.mlp.down_proj.weight .* by config.json \[32, 7\]"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    ],
    ids=str,
)
def test_an_entry_that_does_not_fit_is_told_of(llama, entry, told):
    with pytest.raises(UnsupportedModelError, match=told):
        load_checkpoint(llama, read_config(llama, entry))


def test_loaded_parameters_are_views_of_the_mapped_file(llama):
    model = load_checkpoint(llama, read_config(llama))
    ranges = mapped_ranges(llama / "model.safetensors")
    for parameter in model.parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in ranges)


def test_sharded_checkpoints_load_like_whole_ones(llama, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, sharded = (logits_in_chunks(load(worker_config(folder)), PROMPTS, 4) for folder in (llama, tmp_path))
    assert largest_difference(whole, sharded) == 0


def test_tied_weights_are_one_tensor(tmp_path):
    folder = save_tiny_model("llama, tied", tmp_path)
    model = load_checkpoint(folder, read_config(folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(("setting", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_the_checkpoints_dtype_is_kept_unless_another_is_set(setting, expected, llama, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert serving_dtype(ModelConfig(dtype=setting), read_config(tmp_path)) is expected
    leader = load(worker_config(tmp_path, dtype=setting))
    rounded = logits_in_chunks(leader, PROMPTS, 4)
    assert 0 < largest_difference(rounded, logits_in_chunks(load(worker_config(llama)), PROMPTS, 4)) < 0.5


def test_a_hf_backend_has_no_weights_but_real_buffers(llama):
    config = read_config(llama)
    hf_backend, loaded = build_hf_model(config), load_checkpoint(llama, config)
    assert all(parameter.is_meta for parameter in hf_backend.parameters())
    assert torch.equal(hf_backend.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
    assert not nn.Linear(2, 2).weight.is_meta, "torch is left as it was"


def test_dummy_weights_depend_on_seed_and_name_alone():
    parameter = torch.empty(4, 3)
    first = DummyWeights(1, torch.device("cpu"))
    assert torch.equal(first("a.weight", parameter), DummyWeights(1, torch.device("cpu"))("a.weight", parameter))
    assert not torch.equal(first("a.weight", parameter), first("b.weight", parameter))
    assert not torch.equal(first("a.weight", parameter), DummyWeights(2, torch.device("cpu"))("a.weight", parameter))


@pytest.mark.parametrize("family", ["llama, tied", "mixtral", "gemma3_text"])
def test_dummy_models_need_no_weights_and_are_the_same_on_any_number_of_ranks(family, tmp_path):
    folder = save_tiny_model(family, tmp_path)
    (folder / "model.safetensors").unlink()
    whole = logits_in_chunks(load(worker_config(folder, load_format="dummy")), PROMPTS, 4)
    split_config = worker_config(folder, 2, load_format="dummy")
    split = on_ranks(split_config, lambda leader: logits_in_chunks(leader, PROMPTS, 4))
    assert whole[0].std() > 0
    assert largest_difference(whole, split) <= 1e-5


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"generation_config": {"eos_token_id": 7}}, {7}),
        ({"generation_config": {}}, {2}),
        ({}, {2}),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(files, expected, llama, tmp_path):
    write(tmp_path, **files)
    assert read_eos_token_ids(tmp_path, read_config(llama)) == expected


@pytest.mark.parametrize("token", ["<end>", {"content": "<end>"}])
def test_end_tokens_come_from_the_tokenizer_last(token, llama, tmp_path):
    config = read_config(llama)
    config.eos_token_id = None
    tokenizer = {"added_tokens": [{"id": 4, "content": "<pad>"}, {"id": 5, "content": "<end>"}]}
    write(tmp_path, tokenizer_config={"eos_token": token}, tokenizer=tokenizer)
    assert read_eos_token_ids(tmp_path, config) == {5}


def test_the_first_line_of_an_error_has_what_follows_a_colon():
    assert first_line(ValueError("validator 'x':\n    ValueError: too few heads\nat all")) == (
        "validator 'x': ValueError: too few heads"
    )
    assert first_line(ValueError("no file\nanywhere")) == "no file"
    assert first_line(ValueError()) == "ValueError"
