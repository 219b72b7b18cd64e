"""Text models of checkpoints that hold several models, as they lie on disk, beside the whole models' logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.models.memory import MemoryEstimator
from holdfast.worker.models.text_model import text_config, text_model_notice, text_name
from holdfast.worker.models.weight_files import weight_bytes
from tests.parity.harness import is_run_by, load, logits_in_chunks, on_ranks, relative_difference, worker_config
from tests.parity.hybrids import DELTA_NET, EXPERTS, LFM2, LFM2_MOE
from tests.worker.models.formats.quantized_folders import LAYOUTS

PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 40)]
TOLERANCE = 1e-4

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
}
VISION_OF = {
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
}
"""Of those that do not take these entries."""

MROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""With queries that grow from position 16 on."""
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
GLM_MOE = {
    "attention_bias": True,
    "rope_parameters": GLM_ROPE,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
    "topk_group": 1,
}
MODELS = {
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma4": {
        "model_type": "gemma4_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": True,
    },
    "gemma4, E2B": {
        "model_type": "gemma4_text",
        "sliding_window": 16,
        "num_hidden_layers": 5,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 1,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": True,
    },
    "glm46v, mixture": {**GLM_MOE, "model_type": "glm4v_moe_text"},
    "glm4v": {"attention_bias": True, "rope_parameters": GLM_ROPE, "num_hidden_layers": 2},
    "glm4v_moe": GLM_MOE,
    "idefics3": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "lfm2_vl": {"model_type": "lfm2", **LFM2, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_vl, mixture": {
        "model_type": "lfm2_moe",
        **LFM2_MOE,
        "layer_types": ["conv", "full_attention", *["conv"] * 2],
    },
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "mistral"},
    "llava_onevision": {"model_type": "qwen2"},
    "mistral3": {"model_type": "mistral"},
    "mistral3, Ministral 3": {"model_type": "ministral3", "sliding_window": None, "rope_parameters": YARN},
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
    "qwen2_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
    "qwen3_5": {**DELTA_NET, "head_dim": 32, "rope_parameters": MROPE},
    "qwen3_5_moe": {**DELTA_NET, **EXPERTS, "head_dim": 32, "rope_parameters": MROPE},
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 3, 2]}},
    "smolvlm": {"model_type": "llama"},
}
"""By type of the whole: what its text model has besides. Queries of Mistral and tied heads have cases of their own."""

QWEN_MOE = {
    **MODELS["qwen3_vl"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

OF_THE_HUB = {
    "gemma3": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "llava": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "mistral3": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "qwen2_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
}
"""How files that were published before have the names that transformers writes today."""


def write(folder: Path, kind: str, text: dict[str, Any]) -> Any:
    """Saves a random model of several, and returns it."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    torch.manual_seed(0)
    kind = kind.partition(",")[0]
    config = CONFIG_MAPPING[kind](
        text_config={key: value for key, value in {**TEXT, **text}.items() if value is not ...},
        vision_config=VISION_OF.get(kind, VISION),
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.08)
    model.save_pretrained(folder)
    return model


def rename(folder: Path, names: dict[str, str]) -> None:
    path = folder / "model.safetensors"
    renamed = {}
    for name, values in load_file(path).items():
        old = next((old for old in names if name.startswith(old)), None)
        renamed[name if old is None else names[old] + name.removeprefix(old)] = values
    save_file(renamed, path, metadata={"format": "pt"})


def quantize(folder: Path, model: Any, layout: str) -> None:
    """Quantizes linears of the text model's layers, by the names of the files; the whole model gets their numbers."""
    packer, config = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    stored, parameters = load_file(folder / "model.safetensors"), dict(model.named_parameters())
    for name in [name for name in stored if ".language_model.layers." in name and name.endswith("_proj.weight")]:
        parts, numbers = packer(*stored.pop(name).shape, rng)
        stored |= {f"{name.removesuffix('weight')}{part}": values for part, values in parts.items()}
        parameters[name].data = torch.from_numpy(np.ascontiguousarray(numbers))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    ignored = {"ignore": ["lm_head", "re:.*visual.*", "re:.*vision.*"]} if "config_groups" in config else {}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {**config, **ignored}}))


def logits_of_text(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", MODELS)
def test_the_text_model_has_the_logits_of_the_whole(tmp_path, kind):
    expected = logits_of_text(write(tmp_path, kind, MODELS[kind]))
    leader = load(worker_config(tmp_path, dtype="float32"))
    assert is_run_by(leader, "native")
    assert relative_difference(logits_in_chunks(leader, PROMPTS, chunk=16), expected) <= TOLERANCE


def test_layers_that_share_keys_and_values_keep_none_and_tables_are_counted(tmp_path):
    model = write(tmp_path, "gemma4, E2B", MODELS["gemma4, E2B"])
    config = worker_config(tmp_path, dtype="float32")
    leader, estimate = load(config), MemoryEstimator(config)
    executor = leader._runner.backend.executor
    assert [spec.key_dim for spec in executor.packed.kv_specs] == [16, 16, 32]
    assert leader._runner.info.kv_bytes_per_token == estimate.kv_bytes_per_token
    assert executor.kv_bytes_per_token == 2 * (32 + 16) * 4 + (32 + 32) * 4
    text = model.model.language_model
    assert text.embed_tokens_per_layer.weight.numel() == 128 * 5 * 24
    assert 0 <= estimate.weight_bytes - 4 * sum(one.numel() for one in text.parameters()) < 64


@pytest.mark.parametrize("executor", ["native", "hf"])
def test_experts_are_read_as_the_hub_has_them_and_as_transformers_writes_them(tmp_path, executor):
    """The hub's files have them as [experts, in, out], which the native backend reads."""
    expected = logits_of_text(write(tmp_path, "qwen3_vl_moe", QWEN_MOE))
    if executor == "native":
        path = tmp_path / "model.safetensors"
        turned = {
            name: values.transpose(1, 2).contiguous() if ".experts." in name else values
            for name, values in load_file(path).items()
        }
        save_file(turned, path, metadata={"format": "pt"})
    leader = load(worker_config(tmp_path, dtype="float32"))
    assert is_run_by(leader, executor)
    assert relative_difference(logits_in_chunks(leader, PROMPTS, chunk=16), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "layout"), [("qwen2_5_vl", "awq"), ("gemma3", "ct w4a16 asym"), ("mistral3", "gptq act-order")]
)
def test_a_text_model_may_be_quantized(tmp_path, kind, layout):
    """The others are not: images are read by plain weights beside it."""
    model = write(tmp_path, kind, MODELS[kind])
    quantize(tmp_path, model, layout)
    leader = load(worker_config(tmp_path, dtype="float32"))
    assert is_run_by(leader, "native")
    assert relative_difference(logits_in_chunks(leader, PROMPTS, chunk=16), logits_of_text(model)) <= TOLERANCE


@pytest.mark.parametrize("kind", OF_THE_HUB)
def test_names_of_older_files_are_read(tmp_path, kind):
    expected = logits_of_text(write(tmp_path, kind, MODELS[kind]))
    rename(tmp_path, OF_THE_HUB[kind])
    leader = load(worker_config(tmp_path, dtype="float32"))
    assert relative_difference(logits_in_chunks(leader, PROMPTS, chunk=16), expected) <= TOLERANCE


def test_modules_of_hugging_face_read_the_text_model_and_no_other(tmp_path):
    expected = logits_of_text(write(tmp_path, "qwen3_vl", MODELS["qwen3_vl"]))
    leader = load(worker_config(tmp_path, executor="hf", dtype="float32"))
    assert is_run_by(leader, "hf")
    assert relative_difference(logits_in_chunks(leader, PROMPTS, chunk=16), expected) <= TOLERANCE


def test_ranks_share_the_text_model(tmp_path):
    expected = logits_of_text(write(tmp_path, "qwen3_vl", MODELS["qwen3_vl"]))
    config = worker_config(tmp_path, 2, dtype="float32")
    ours = on_ranks(config, lambda leader: logits_in_chunks(leader, PROMPTS, chunk=16))
    assert relative_difference(ours, expected) <= TOLERANCE


def test_a_tied_head_is_the_embedding(tmp_path):
    expected = logits_of_text(write(tmp_path, "qwen3_vl", {**MODELS["qwen3_vl"], "tie_word_embeddings": True}))
    leader = load(worker_config(tmp_path, dtype="float32"))
    assert relative_difference(logits_in_chunks(leader, PROMPTS, chunk=16), expected) <= TOLERANCE


def test_only_the_text_model_counts_for_memory(tmp_path):
    model = write(tmp_path, "qwen3_vl", MODELS["qwen3_vl"])
    text = sum(p.numel() for p in model.model.language_model.parameters()) + model.lm_head.weight.numel()
    assert weight_bytes(tmp_path) == 4 * text < 4 * sum(p.numel() for p in model.parameters())
    num_others = sum("visual" in name for name in model.state_dict())
    assert f"; {num_others} tensors of other models" in str(text_model_notice(tmp_path))


def test_a_missing_tensor_is_named(tmp_path):
    write(tmp_path, "qwen3_vl", MODELS["qwen3_vl"])
    rename(tmp_path, {"model.language_model.layers.1.mlp.up_proj": "model.visual.elsewhere"})
    with pytest.raises(UnsupportedModelError, match=r"is missing 1 weights \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load(worker_config(tmp_path))


def test_the_flat_config_of_an_older_file_is_the_text_models(tmp_path):
    """Qwen2-VL's files were published with the entries of the text model beside those of the vision model."""
    expected = logits_of_text(write(tmp_path, "qwen2_vl", MODELS["qwen2_vl"]))
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    text = raw.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    theta = text.pop("rope_parameters")["rope_theta"]
    raw = {**text, **raw, "rope_theta": theta, "architectures": ["Qwen2VLForConditionalGeneration"]}
    path.write_text(json.dumps({**raw, "model_type": "qwen2_vl", "vision_start_token_id": 7}))
    rename(tmp_path, OF_THE_HUB["qwen2_vl"])
    leader = load(worker_config(tmp_path, dtype="float32"))
    assert relative_difference(logits_in_chunks(leader, PROMPTS, chunk=16), expected) <= TOLERANCE


def test_entries_of_the_whole_are_the_text_models_where_it_has_none():
    raw = {
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "ignored_layers": ["model.language_model.layers.0.mlp", "lm_head"],
        },
        "text_config": {"model_type": "qwen3_vl_text"},
    }
    found = text_config(raw)
    assert found["dtype"] == "bfloat16"
    assert found["quantization_config"]["ignored_layers"] == ["model.layers.0.mlp", "lm_head"]
    assert text_config(raw, ["model.language_model.norm.weight"])["tie_word_embeddings"]
    assert not text_config(raw, ["model.language_model.norm.weight", "lm_head.weight"])["tie_word_embeddings"]


def test_tensors_of_other_models_have_no_name():
    others = (
        "model.visual.blocks.0.attn.qkv.weight",
        "vision_tower.layers.0.weight",
        "mtp.fc.weight",
        "visual.merger.bias",
    )
    assert [text_name(name) for name in others] == [None] * 4
