"""Architectures of GGUF files whose layers differ, or keep states or latents: Gemma 4, LFM2, Granite 4 H, Nemotron,
Falcon-H1, Mamba2, Qwen3.5, Qwen3-Next, DeepSeek, GLM-4.7-Flash. What llama.cpp's converter changes is undone.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.worker.models.formats import gguf_gemma4, gguf_hybrid_configs
from holdfast.worker.models.formats.gguf_experts import QWEN_EXPERTS, QWEN_ROUTER, QWEN_SHARED, each_expert
from holdfast.worker.models.formats.gguf_header import Header
from holdfast.worker.models.formats.gguf_hybrid_changes import (
    Change,
    absorbed,
    behind_keys,
    columns_of_value_heads,
    convolution,
    decays,
    paired,
    rates_and_times,
    row,
    same,
    value_heads,
    vector,
)
from holdfast.worker.models.formats.gguf_metadata import Metadata, NamedTensor, NotUnderstood

_HEAD: Final = "output.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """Description of a `general.architecture`. Names of stored tensors are GGUF's in a block."""

    model_type: str | Callable[[Metadata], str]
    settings: Callable[[Metadata], dict[str, Any]]
    """Content of the config, besides what all models have."""
    top: Mapping[str, str]
    parts: tuple[Mapping[str, str], ...]
    """Parts of a layer: its parameters by stored tensors; two for one parameter are its rows, in this order. A layer
    has the parts of which the file has a tensor, and biases where the file has them."""
    optional: frozenset[str] = frozenset()
    """Stored tensors that a part may lack."""
    base: str = "model.layers."
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Rules by stored tensors, for tensors that are not the parameter itself."""
    plus: float = 0.0
    """Value added to all norms but those of states."""


def _weights(modules: Mapping[str, str]) -> dict[str, str]:
    """Parameters by stored tensors, of modules by their names in a block."""
    return {f"{own}.weight": f"{name}.weight" for own, name in modules.items()}


def _mamba(module: str) -> dict[str, str]:
    own = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    vectors = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {name: f"{module}.{one}" for name, one in {**_weights(own), **vectors}.items()}


def _gated(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    return {"ffn_gate": f"{module}.{gate}", "ffn_up": f"{module}.{up}", "ffn_down": f"{module}.{down}"}


_CLASSES: Final = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
_QKV: Final = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_ATTENTION: Final = {**_QKV, "attn_output": "self_attn.o_proj"}
_TOP: Final = _weights({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_MAMBA_CHANGES: Final[Mapping[str, Change]] = {
    "ssm_a": decays,
    "ssm_d": vector,
    "ssm_norm.weight": vector,
    "ssm_conv1d.weight": convolution,
}
_PAIRED: Final[Mapping[str, Change]] = {
    f"{name}.{kind}": paired(heads)
    for name, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}
_DELTA_NET: Final = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_VECTORS: Final = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_QWEN_LAYER: Final = (
    _weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}),
    _weights({**_ATTENTION, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}),
)
_RATE_AND_TIME: Final = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
_QWEN_MOE: Final = _weights({**QWEN_ROUTER, **QWEN_EXPERTS, **QWEN_SHARED})
_QWEN_CHANGES: Final[Mapping[str, Change]] = {
    "attn_qkv.weight": value_heads(behind_keys),
    "attn_gate.weight": value_heads(lambda config: (0, config["linear_value_head_dim"])),
    **dict.fromkeys(("ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias"), value_heads(lambda config: (0, 1))),
    "ssm_a": value_heads(lambda config: (0, 1), decays),
    "ssm_conv1d.weight": value_heads(behind_keys, convolution),
    "ssm_out.weight": columns_of_value_heads,
    "ffn_gate_inp_shexp.weight": row,
}
_NEMOTRON: Final = Hybrid(
    model_type="nemotron_h",
    settings=gguf_hybrid_configs.nemotron_h,
    top=_weights({"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}),
    parts=(
        {"attn_norm.weight": "norm.weight"},
        _mamba("mixer"),
        _weights({name: module.replace("self_attn", "mixer") for name, module in _ATTENTION.items()}),
        _weights({"ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}),
        {
            "ffn_gate_inp.weight": "mixer.gate.weight",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_up_exps.weight": "mixer.experts.{}.up_proj.weight",
            "ffn_down_exps.weight": "mixer.experts.{}.down_proj.weight",
            "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
            "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
        },
    ),
    changes={**_MAMBA_CHANGES, **_PAIRED},
)
_QWEN35: Final = Hybrid(
    model_type="qwen3_5_text",
    settings=gguf_hybrid_configs.qwen_delta_net,
    top=_TOP,
    parts=(*_QWEN_LAYER, {**_weights({**_DELTA_NET, **_RATE_AND_TIME}), **_DELTA_VECTORS}, _weights(_gated("mlp"))),
    changes=_QWEN_CHANGES,
    plus=-1.0,
)
_QWEN35_MOE: Final = replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    parts=(*_QWEN35.parts[:-1], _QWEN_MOE),
)

HYBRIDS: Final[Mapping[str, Hybrid]] = {
    "deepseek2": Hybrid(
        model_type=gguf_hybrid_configs.model_type_of_latents,
        settings=gguf_hybrid_configs.deepseek,
        top=_TOP,
        parts=(
            _weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}),
            _weights({"attn_q": "self_attn.q_proj"}),
            _weights(
                {
                    "attn_q_a": "self_attn.q_a_proj",
                    "attn_q_a_norm": "self_attn.q_a_layernorm",
                    "attn_q_b": "self_attn.q_b_proj",
                }
            ),
            _weights(
                {
                    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                    "attn_output": "self_attn.o_proj",
                }
            ),
            _weights({"attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj"}),
            _weights({"attn_kv_b": "self_attn.kv_b_proj"}),
            _weights(_gated("mlp")),
            {
                "ffn_gate_inp.weight": "mlp.gate.weight",
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
                **_weights(QWEN_EXPERTS),
                "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
                "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
                "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
            },
        ),
        optional=frozenset({"exp_probs_b.bias"}),
        changes={"attn_k_b.weight": absorbed, "attn_v_b.weight": absorbed},
    ),
    "falcon-h1": Hybrid(
        model_type="falcon_h1",
        settings=gguf_hybrid_configs.falcon_h1,
        top={**_TOP, "output_norm.weight": "model.final_layernorm.weight"},
        parts=(
            {"attn_norm.weight": "input_layernorm.weight", "ffn_norm": "pre_ff_layernorm.weight"},
            _weights({**_ATTENTION, **_gated("feed_forward")}),
            _mamba("mamba"),
        ),
        optional=frozenset({"ssm_norm.weight"}),
        changes=_MAMBA_CHANGES,
    ),
    "gemma4": Hybrid(
        model_type="gemma4_text",
        settings=gguf_gemma4.gemma4,
        top={**gguf_gemma4.TOP, **gguf_gemma4.OWN_INPUTS},
        parts=gguf_gemma4.PARTS,
        optional=frozenset(gguf_gemma4.OWN_INPUTS),
        changes={"ffn_gate_up_exps.weight": gguf_gemma4.gate_and_up},
    ),
    "granitehybrid": Hybrid(
        model_type="granitemoehybrid",
        settings=gguf_hybrid_configs.granite_hybrid,
        top=_TOP,
        parts=(
            _weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}),
            _weights(_ATTENTION),
            _mamba("mamba"),
            _weights(_gated("shared_mlp", "input_linear", "input_linear", "output_linear")),
            _weights(
                {
                    "ffn_gate_shexp": "shared_mlp.input_linear",
                    "ffn_up_shexp": "shared_mlp.input_linear",
                    "ffn_down_shexp": "shared_mlp.output_linear",
                }
            ),
            _weights(
                {
                    "ffn_gate_inp": "block_sparse_moe.router.layer",
                    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
                    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
                    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
                }
            ),
        ),
        changes={**_MAMBA_CHANGES, **_PAIRED},
    ),
    "lfm2": Hybrid(
        model_type="lfm2",
        settings=gguf_hybrid_configs.lfm2,
        top={
            **_weights({"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm"}),
            _HEAD: "lm_head.weight",
        },
        parts=(
            _weights({"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}),
            _weights(
                {
                    **_QKV,
                    "attn_output": "self_attn.out_proj",
                    "attn_q_norm": "self_attn.q_layernorm",
                    "attn_k_norm": "self_attn.k_layernorm",
                }
            ),
            _weights({f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}),
            _weights(_gated("feed_forward", "w1", "w3", "w2")),
        ),
        changes={"shortconv.conv.weight": convolution},
    ),
    "mamba2": Hybrid(
        model_type="mamba2",
        settings=gguf_hybrid_configs.mamba2,
        top=_weights({"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}),
        parts=({"attn_norm.weight": "norm.weight"}, _mamba("mixer")),
        base="backbone.layers.",
        changes=_MAMBA_CHANGES,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": replace(
        _QWEN35_MOE,
        parts=(
            *_QWEN_LAYER,
            {**_weights({**_DELTA_NET, "ssm_ba": "linear_attn.in_proj_ba"}), **_DELTA_VECTORS},
            _QWEN_MOE,
        ),
        changes={
            "ssm_a": decays,
            "ssm_conv1d.weight": convolution,
            "ssm_ba.weight": rates_and_times,
            "ffn_gate_inp_shexp.weight": row,
        },
    ),
}
"""Architectures by `general.architecture`. Qwen3-Next is read as a mixture of Qwen3.5, whose layers are the same."""


def hybrid_config(metadata: Metadata, dtype: str) -> dict[str, Any]:
    """Content of the model's config.json. Raises `NotUnderstood`."""
    header, hybrid = metadata.header, HYBRIDS[metadata.architecture]
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise NotUnderstood("has no table token_embd.weight")
    model_type = hybrid.model_type if isinstance(hybrid.model_type, str) else hybrid.model_type(metadata)
    common = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": table.shape[0],
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": metadata.num_own_layers,
        "tie_word_embeddings": _HEAD not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
    }
    return common | hybrid.settings(metadata)


def hybrid_tensors(header: Header, config: Mapping[str, Any]) -> list[NamedTensor]:
    """All tensors of the model, or their parts, by Hugging Face's names. Raises `NotUnderstood` for one too many or too
    few.
    """
    hybrid, num_layers = HYBRIDS[str(header.metadata["general.architecture"])], config["num_hidden_layers"]
    names = _names(header, hybrid, num_layers)
    found: list[NamedTensor] = []
    numbers: Counter[str] = Counter()
    part_of: dict[str, int] = {}
    for stored, name in names.items():
        part_of[stored] = numbers[name]
        numbers[name] += 1
    for tensor in header.tensors.values():
        if tensor.name == "rope_freqs.weight" or _layer(tensor.name) >= num_layers:
            continue  # it is read for the config, or drafts
        whole = names.get(tensor.name) or _name_of_bias(tensor.name, names)
        if whole is None:
            raise NotUnderstood(f"has a tensor {tensor.name}, which no model of its architecture has")
        own = tensor.name.split(".", 2)[-1] if tensor.name.startswith("blk.") else tensor.name
        change = hybrid.changes.get(own, same)
        plus = hybrid.plus if own.endswith("norm.weight") and not own.startswith("ssm_") else 0.0
        for each, one in each_expert(whole, tensor):
            named = NamedTensor(name=each, stored=one, part=part_of.get(tensor.name, 0), plus=plus)
            found += change(named, config)
    optional = hybrid.optional | {_HEAD}
    needed = {stored for stored in names if not {stored, stored.split(".", 2)[-1]} & optional}
    if missing := needed - header.tensors.keys():
        raise NotUnderstood(f"lacks {len(missing)} tensors, such as {min(missing)}")
    return sorted(found, key=lambda one: (one.name, one.part))


def _names(header: Header, hybrid: Hybrid, num_layers: int) -> dict[str, str]:
    """Parameters by the names of required tensors."""
    names = dict(hybrid.top)
    for index in range(num_layers):
        for part in hybrid.parts:
            if any(f"blk.{index}.{own}" in header.tensors for own in part):
                names |= {f"blk.{index}.{own}": f"{hybrid.base}{index}.{name}" for own, name in part.items()}
    return names


def _layer(name: str) -> int:
    """-1 for a tensor of no layer."""
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return int(block) if block.isdigit() else -1


def _name_of_bias(stored: str, names: Mapping[str, str]) -> str | None:
    weight = names.get(f"{stored.removesuffix('.bias')}.weight") if stored.endswith(".bias") else None
    return None if weight is None else f"{weight.removesuffix('.weight')}.bias"
