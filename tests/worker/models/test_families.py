"""Each stated family computes what Hugging Face computes: config, tensors' names, layouts on 1, 2 and 4 ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.executors.layout import Attention, DecoderLayout, Experts, Layer
from holdfast.worker.executors.layout_arithmetic import QueryScale
from holdfast.worker.executors.linears import Norm
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models import stated_config
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.reference import Reference
from holdfast.worker.models.stated_config import read_stated_config
from holdfast.worker.models.stated_layout import read_stated
from holdfast.worker.models.weights import read_config
from tests.fake_group import run_ranks
from tests.parity.families import NOT_SPLIT, YARN
from tests.worker.executors.models import (
    ENCODER_MODELS,
    MODELS,
    TOKENS,
    config_of,
    expected_logits,
    hugging_face,
    layout_of,
    layout_of_module,
)
from tests.worker.models.layouts import differences, stated

TOLERANCE = 1e-5
"""Of the largest logit."""

LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LONG_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.3}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0] * 4,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}
MIXED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    **ENCODER_MODELS,
    "gemma, biases": ("gemma", {"attention_bias": True, "tie_word_embeddings": False}),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "granite, biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, heads by the hidden size": ("llama", {"head_dim": None, "num_key_value_heads": None}),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3, longrope with a factor of attention": (
        "phi3",
        {"rope_parameters": {**LONGROPE, "attention_factor": 1.25}, "original_max_position_embeddings": 64},
    ),
    "gemma3_text, one kind of layer": ("gemma3_text", {"layer_types": ["full_attention"] * 2}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "cwm, biases": ("cwm", {"mlp_bias": True}),
    "ernie4_5, biases": ("ernie4_5", {"use_bias": True}),
    "gpt_neox, no biases": ("gpt_neox", {"attention_bias": False}),
    "nemotron, biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "seed_oss, biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "helium, biases": ("helium", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_moe, windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "decoder_sparse_step": 2}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn with all it may have": ("llama", {"rope_parameters": LONG_YARN}),
    "llama, yarn with a factor of attention": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "mistral, no window": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen2, windows": ("qwen2", {**SLIDING, "tie_word_embeddings": False}),
    "qwen2, windows by layer": ("qwen2", MIXED),
    "qwen3, windows and biases": ("qwen3", {**SLIDING, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "rms_norm_eps": 1e-5}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3, windows": (
        "smollm3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": False},
    ),
}
"""By name: the family, and what is changed of its tiny model."""


def test_every_family_of_the_table_is_tried():
    tried = {config_of(family).model_type for family, _ in CASES.values()}
    assert {name for name, family in FAMILIES.items() if not family.keeps_state} <= tried  # the others: test_hybrids.py


def config_of_case(name: str) -> Any:
    family, changes = CASES[name]
    return config_of(name) if name in MODELS | ENCODER_MODELS else config_of(family, **changes)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_layout_has_the_logits_of_hugging_face(tmp_path, name):
    """Its shares too; and the files say what the modules do, by whichever names."""
    config = config_of_case(name)
    model, expected = hugging_face(config), expected_logits(config)
    model.save_pretrained(tmp_path)
    for size in (1, 2, 4):
        if size > 1 and name in NOT_SPLIT:
            assert "have to gather" in run_ranks(size, partial(read_stated, ModelConfig(model="m"), tmp_path))[0]
            continue
        for ours, logits, in_memory in run_ranks(size, partial(read_and_run, model, tmp_path)):
            assert distance(logits, expected) <= TOLERANCE, size
            assert differences(ours, in_memory) == [], size


def read_and_run(model: Any, folder: Path, group: TensorParallelGroup) -> tuple[DecoderLayout, Tensor, DecoderLayout]:
    layout = stated(folder, group)
    return layout, Reference(layout, group).run_model(TOKENS), layout_of_module(model, group)


# --- config.json ---

UNSCALED = ("phi3", "gemma4_text", "modernbert")
"""Families whose old configs scale no rotary angles, or otherwise."""

SIZES = {"vocab_size": 126, "hidden_size": 1280, "intermediate_size": 48, "num_hidden_layers": 30}


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.keeps_state])
def test_what_config_json_leaves_out_is_what_transformers_takes(tmp_path, family):
    """And the older names of rotary angles are read alike."""
    heads = FAMILIES[family].entries.get("num_key_value_heads") if FAMILIES[family].latent else None
    raw = {"model_type": family, "dtype": "bfloat16", **SIZES, "max_position_embeddings": 64}
    raw |= {"num_attention_heads": heads or 160, "num_experts_per_tok": 2}
    scaling = {"rope_scaling": {"type": "linear", "factor": 2.0}} if family not in UNSCALED else {}
    theta = {"gpt_neox": "rotary_emb_base", "modernbert": "global_rope_theta"}.get(family, "rope_theta")
    for more in ({}, {theta: 5000, **scaling, FAMILIES[family].eps: 1e-4}):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **more}))
        ours, theirs = read_stated_config({**raw, **more}), read_config(tmp_path)
        theirs.allow_global_per_layer_attribute_access = True
        expected = {name: getattr(theirs, name, None) for name in vars(ours)}
        if hasattr(ours, "first_position"):  # those before it are of no token
            expected["max_position_embeddings"] -= ours.first_position
        expected["head_dim"] = expected["head_dim"] or 8  # by modules, where a config has none
        expected["num_key_value_heads"] = expected["num_key_value_heads"] or 160
        assert {name: plain(value) for name, value in vars(ours).items() if name in entries_of(theirs)} == {
            name: plain(value) for name, value in expected.items() if name in entries_of(theirs)
        }


def entries_of(config: Any) -> set[str]:
    """Those that transformers has for the family."""
    return {name for name in vars(config) if name not in ("sliding_window", "mlp_only_layers")} | {"head_dim"}


def plain(value: Any) -> Any:
    """Without older names of entries, and those that do nothing."""
    if not isinstance(value, dict):
        return value
    kept = {key: plain(item) for key, item in value.items() if key not in ("type", "max_position_embeddings")}
    return {key: item for key, item in kept.items() if (key, item) != ("partial_rotary_factor", 1.0)}


NOT_OF_LOGITS = {
    *("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop"),
    *("initializer_range", "pad_token_id", "use_cache", "router_aux_loss_coef", "output_router_logits", "num_labels"),
    *("output_attentions", "output_hidden_states", "return_dict", "problem_type", "_name_or_path", "architectures"),
    *("torch_dtype", "dtype", "pruned_heads", "tie_encoder_decoder", "is_encoder_decoder", "is_decoder", "model_type"),
    *("rope_parameters", "attribute_map", "router_jitter_noise", "pretraining_tp", "classifier_dropout"),
    *("quantization_config", "chunk_size_feed_forward", "bos_token_id", "eod_token_id", "num_mtp_layers"),
    "use_double_wide_mlp",  # of layers that share keys and values, which are not stated
    *("chunk_size", "mamba_chunk_size", "rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels"),
    *("time_step_floor", "time_step_max", "time_step_rank", "time_step_min"),  # of the first values of weights
    *("z_loss_coefficient", "expand"),  # the product of heads and their size
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "mlp_dropout", "initializer_cutoff_factor"),
    "deterministic_flash_attn",
}
"""Entries that transformers' code reads, and that are no family's own: of training, or read apart."""


@pytest.mark.parametrize("name", FAMILIES)
def test_the_entries_that_the_code_of_transformers_reads_are_stated(monkeypatch, name):
    """So an entry of config.json that a family does not name changes nothing."""
    config, family = config_of(name), FAMILIES[name]
    own, read = set(config.to_dict()), set[str]()
    usual = type(config).__getattribute__

    def noted(self: Any, key: str) -> Any:
        read.add(key)
        return usual(self, key)

    model = hugging_face(config)  # in one go: building sets what is read at first
    monkeypatch.setattr(type(config), "__getattribute__", noted)
    type(model)(config)
    with torch.inference_mode():
        model(TOKENS[None], use_cache=False)  # a cache must have a layer that attends
    known = {*stated_config._COMMON, *family.entries, *family.aliases, *family.fixed, *stated_config._FIXED}
    assert read & own - known <= NOT_OF_LOGITS


# --- planted mistakes ---


def every_layer(change: Callable[[Layer], Layer]) -> Callable[[DecoderLayout], DecoderLayout]:
    return lambda layout: replace(layout, layers=tuple(change(layer) for layer in layout.layers))


def every_attention(change: Callable[[Attention], Attention]) -> Callable[[DecoderLayout], DecoderLayout]:
    return every_layer(lambda layer: replace(layer, attention=change(layer.attention)))


def attentions(**changes: Any) -> Callable[[DecoderLayout], DecoderLayout]:
    return every_attention(lambda attention: replace(attention, **changes))


def mixtures(**changes: Any) -> Callable[[DecoderLayout], DecoderLayout]:
    def changed(layer: Layer) -> Layer:
        return replace(layer, mlp=replace(layer.mlp, **changes)) if isinstance(layer.mlp, Experts) else layer

    return every_layer(changed)


def besides(change: Callable[[Any], Any]) -> Callable[[DecoderLayout], DecoderLayout]:
    return every_layer(lambda layer: replace(layer, beside=change(layer.beside)))


def without_offset(norm: Norm) -> Norm:
    return replace(norm, weight=norm.weight - 1.0)


def rotaries(change: Callable[[Any], Any]) -> Callable[[DecoderLayout], DecoderLayout]:
    return lambda layout: replace(layout, rotaries=tuple(map(change, layout.rotaries)))


def inputs(change: Callable[[Any], dict[str, Any]]) -> Callable[[DecoderLayout], DecoderLayout]:
    return lambda layout: replace(layout, inputs=replace(layout.inputs, **change(layout.inputs)))


def places(change: Callable[[Any], dict[str, Any]]) -> Callable[[DecoderLayout], DecoderLayout]:
    return lambda layout: replace(layout, places=replace(layout.places, **change(layout.places)))


SHARED = "gemma4_text, shared keys"
OTHER_STYLE = rotaries(lambda rotary: replace(rotary, interleaved=not rotary.interleaved))
LATE = {"rope_parameters": {**YARN, "original_max_position_embeddings": 20, "llama_4_scaling_beta": 0.3}}
MISTAKES: dict[str, tuple[str, Callable[[DecoderLayout], DecoderLayout]]] = {
    "norm offset": (
        "gemma",
        every_layer(lambda layer: replace(layer, mlp_norm=without_offset(layer.mlp_norm))),
    ),
    "offset of the last norm": ("gemma2", lambda layout: replace(layout, norm=without_offset(layout.norm))),
    "epsilon": ("qwen3", every_layer(lambda layer: replace(layer, mlp_norm=replace(layer.mlp_norm, eps=1e-5)))),
    "window off by one": ("mistral", attentions(sliding_window=3)),
    "window in the wrong layers": ("gemma3_text", attentions(sliding_window=4)),
    "rotary style": ("llama", OTHER_STYLE),
    "rotary style, partial": ("glm4", OTHER_STYLE),
    "rotary base": (
        "llama",
        rotaries(lambda rotary: replace(rotary, inverse_frequencies=rotary.inverse_frequencies**1.001)),
    ),
    "rotary where there is none": ("smollm3", attentions(rotary=0)),
    "attention scale": ("granite", attentions(scaling=8**-0.5)),
    "residual scale": ("granite", every_layer(lambda layer: replace(layer, residual_scale=1.0))),
    "embedding scale": ("granite", lambda layout: replace(layout, embedding_scale=1.0)),
    "logit scale": ("cohere2", lambda layout: replace(layout, logit_scale=1.0)),
    "logit softcap": ("gemma3_text, softcap", lambda layout: replace(layout, logit_softcap=None)),
    "attention softcap": ("gemma2", attentions(softcap=None)),
    "sinks": ("gpt_oss", attentions(sinks=None)),
    "weights of experts": ("qwen3_moe", mixtures(normalized=True)),
    "parallel": ("stablelm, parallel", every_layer(lambda layer: replace(layer, parallel=False))),
    "bias of choice": ("minimax_m2", mixtures(selection_bias=None)),
    "groups of experts by their best": ("deepseek_v2, groups", mixtures(num_groups=1)),
    "scale of yarn": ("deepseek_v3, groups and yarn", attentions(scaling=16**-0.5)),
    "rotary style of latents": ("deepseek_v3", OTHER_STYLE),
    "latents that are not normed": (
        "glm4_moe_lite",
        every_attention(lambda one: replace(one, latent_norm=replace(one.latent_norm, weight=torch.ones(16)))),
    ),
    "epsilon of latents": (
        "glm4_moe_lite",
        every_attention(lambda one: replace(one, latent_norm=replace(one.latent_norm, eps=1e-3))),
    ),
    "heads of another": (
        "deepseek_v3",
        every_attention(lambda one: replace(one, expand=replace(one.expand, weights=one.expand.weights[::-1]))),
    ),
    "groups of experts": ("glm4_moe, groups", mixtures(num_groups=1)),
    "scale of experts": ("glm4_moe", mixtures(scales=None)),
    "scale of a layer": ("gemma4_text, dense", every_layer(lambda layer: replace(layer, output_scale=1.0))),
    "norm of values": ("gemma4_text, dense", attentions(value_norm=None)),
    "input of a router": ("gemma4_text", besides(lambda one: replace(one, router_norm=one.norm))),
    "norms of a mixture and an MLP exchanged": (
        "gemma4_text",
        besides(lambda one: replace(one, out_norm=one.mlp_out_norm, mlp_out_norm=one.out_norm)),
    ),
    "keys of the first layer of a kind": (
        SHARED,
        every_layer(
            lambda layer: (
                replace(layer, attention=replace(layer.attention, kv_source=0))
                if layer.attention.kv_source == 2
                else layer
            )
        ),
    ),
    "inputs of the layer before": (SHARED, inputs(lambda one: {"table": one.table.roll(one.dim, 1)})),
    "inputs of the token before": (SHARED, inputs(lambda one: {"table": one.table.roll(1, 0)})),
    "scale of a table of inputs": (SHARED, inputs(lambda one: {"table_scale": 1.0})),
    "no input of a layer": (SHARED, every_layer(lambda layer: replace(layer, input=None))),
    "norms before rotation": ("hunyuan_v1_dense", attentions(norms_after_rotation=False)),
    "query scale": ("ministral3", attentions(query_scale=None)),
    "query scale, later": ("ministral3, later", attentions(query_scale=QueryScale(beta=0.31, length=20))),
    "query scale, never": ("ministral3, later", attentions(query_scale=QueryScale(beta=0.3, length=32))),
    "no position": ("bert", places(lambda one: {"positions": one.positions * 0})),
    "the position before": ("roberta", places(lambda one: {"positions": one.positions.roll(1, 0)})),
    "the second text's tokens": ("bert", places(lambda one: {"segments": one.segments.flip(0)})),
    "norms before residual sums": (
        "bert",
        every_layer(lambda layer: replace(layer, mlp_norm=replace(layer.mlp_norm, stays=False))),
    ),
    "an embedding beside its norm": (
        "modernbert",
        every_layer(lambda layer: replace(layer, attention_norm=replace(layer.attention_norm, stays=False))),
    ),
    "tokens that see those before them alone": ("modernbert", attentions(sees_behind=False)),
    "window of an encoder off by one": ("modernbert, windows first", attentions(sliding_window=4)),
    "the weights of another layer": ("llama", lambda layout: replace(layout, layers=(layout.layers[0],) * 2)),
}
"""By name: a model, and what its layout says wrongly."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_a_layout_shows_in_its_logits(name):
    model, change = MISTAKES[name]
    config = config_of("ministral3", **LATE) if model == "ministral3, later" else config_of(model)
    layout, expected = layout_of(config), expected_logits(config)
    assert distance(Reference(layout).run_model(TOKENS), expected) <= TOLERANCE
    assert distance(Reference(change(layout)).run_model(TOKENS), expected) > 2 * TOLERANCE
