"""Families with Mamba2 layers, stated (`families.py`): Granite 4 H, Nemotron 3, Bamba, Falcon-H1 and Mamba2 alone."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from holdfast.worker.models.family import Family, Mamba, MambaScales, Moe
from holdfast.worker.models.family_bases import BARE, DEEPSEEK_MOE, GRANITE, PLAIN

LINEAR: Final = "linear_attention"
_LAYERS: Final = frozenset({LINEAR, "full_attention"})
_NEW_NAMES: Final = {"mamba": LINEAR, "attention": "full_attention"}
_LETTERS: Final = {"M": LINEAR, "E": "moe", "*": "full_attention", "-": "mlp"}
_BOUNDS: Final = {"time_step_limit": (0.0, math.inf)}

_MAMBA: Final = {
    **_BOUNDS,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def _complete_mamba(config: Any, inner: int | None = None) -> None:
    """Sizes of heads follow from the inner features, which are a multiple of the hidden ones unless they are given."""
    inner = config.mamba_expand * config.hidden_size if inner is None else inner
    if config.mamba_d_head == "auto":
        config.mamba_d_head = inner // config.mamba_n_heads
    _complete_bounds(config)


def _complete_bounds(config: Any) -> None:
    bounds = config.time_step_limit or _BOUNDS["time_step_limit"]
    config.time_step_limit = tuple(math.inf if isinstance(one, Mapping) else float(one) for one in bounds)


def _derive_granite(config: Any) -> None:
    _complete_mamba(config)
    types = [LINEAR] * config.num_hidden_layers if config.layer_types is None else config.layer_types
    config.layer_types = [_NEW_NAMES.get(kind, kind) for kind in types]


def _derive_bamba(config: Any) -> None:
    _complete_mamba(config)
    attending = config.attn_layer_indices or ()
    config.layer_types = [
        "full_attention" if index in attending else LINEAR for index in range(config.num_hidden_layers)
    ]


def _derive_falcon(config: Any) -> None:
    _complete_mamba(config, config.mamba_d_ssm)
    config.layer_types = ["hybrid"] * config.num_hidden_layers
    config.mlp_multipliers = config.mlp_multipliers or [1.0] * 2
    config.ssm_multipliers = config.ssm_multipliers or [1.0] * 5


def _derive_nemotron(config: Any) -> None:
    types = config.layer_types
    if types is None:
        pattern = config.hybrid_override_pattern or "ME*-"
        types = [_LETTERS.get(letter, letter) for letter in pattern]
    config.layer_types = [_NEW_NAMES.get(kind, kind) for kind in types]
    config.num_hidden_layers = len(config.layer_types)


def _derive_mamba2(config: Any) -> None:
    """Heads that would attend stand for those of Mamba2, which ranks share."""
    config.layer_types = [LINEAR] * config.num_hidden_layers
    config.num_attention_heads = config.num_key_value_heads = config.num_heads
    _complete_bounds(config)


def _never(config: Any, index: int) -> bool:
    return False


def _falcon_scales(config: Any) -> MambaScales:
    z, x, b, c, dt = config.ssm_multipliers
    return MambaScales(input=config.ssm_in_multiplier, z=z, x=x, b=b, c=c, dt=dt, output=config.ssm_out_multiplier)


def _refused_falcon(config: Any) -> str | None:
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        return "its Mamba2 layers norm before the gate"
    scales = config.attention_in_multiplier, config.attention_out_multiplier
    return "its attention has biases and scales" if config.attention_bias and scales != (1, 1) else None


_GRANITE_MAMBA: Final = Mamba()
_FALCON_MAMBA: Final = replace(
    _GRANITE_MAMBA,
    output_bias="projectors_bias",
    has_norm="mamba_rms_norm",
    scales=_falcon_scales,
    refused=_refused_falcon,
)
_NEMOTRON_MAMBA: Final = Mamba(
    module="mixer",
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    num_groups="n_groups",
    state_dim="ssm_state_size",
    width="conv_kernel",
    conv_bias="use_conv_bias",
    input_bias="use_bias",
    output_bias="use_bias",
    activation="mamba_hidden_act",
    time_bounds=lambda config: (float(config.time_step_min), math.inf),
)
_MAMBA2: Final = replace(
    _NEMOTRON_MAMBA,
    num_heads="num_heads",
    head_dim="head_dim",
    state_dim="state_size",
    activation="hidden_act",
    time_bounds=lambda config: tuple(config.time_step_limit),
)

MAMBAS: Final[Mapping[str, Family]] = {
    "bamba": replace(
        PLAIN,
        architecture="BambaForCausalLM",
        entries={
            **_MAMBA,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "attn_layer_indices": None,
        },
        derive=_derive_bamba,
        layer_types=_LAYERS,
        final_norm="final_layernorm",
        mlp_norm="pre_ff_layernorm",
        mamba=_GRANITE_MAMBA,
        state_lengths={LINEAR: _GRANITE_MAMBA.state_length},
        partial=0.5,
        mlp="feed_forward",
        mlp_bias="mlp_bias",
    ),
    "falcon_h1": replace(
        PLAIN,
        architecture="FalconH1ForCausalLM",
        entries={
            **_MAMBA,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "projectors_bias": False,
            "lm_head_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "mlp_multipliers": None,
            "key_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "ssm_multipliers": None,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        },
        derive=_derive_falcon,
        layer_types=frozenset({"hybrid"}),
        final_norm="final_layernorm",
        mlp_norm="pre_ff_layernorm",
        mamba=_FALCON_MAMBA,
        state_lengths={"hybrid": _FALCON_MAMBA.state_length},
        scaling=lambda config: float(config.head_dim**-0.5 * config.key_multiplier * config.attention_in_multiplier**2),
        value_scale=lambda config: float(config.attention_in_multiplier * config.attention_out_multiplier),
        mlp="feed_forward",
        mlp_scales=lambda config: tuple(config.mlp_multipliers),
        mlp_bias="mlp_bias",
        embedding_scale=lambda config: float(config.embedding_multiplier),
        logit_scale=lambda config: float(config.lm_head_multiplier),
    ),
    "granitemoehybrid": replace(
        GRANITE,
        architecture="GraniteMoeHybridForCausalLM",
        entries={
            **{name: value for name, value in GRANITE.entries.items() if name != "mlp_bias"},
            **_MAMBA,
            "layer_types": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
        },
        aliases={"layers_block_type": "layer_types"},
        derive=_derive_granite,
        layer_types=_LAYERS,
        stored_as=(
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
            (".router.weight", ".router.layer.weight"),
        ),
        mamba=_GRANITE_MAMBA,
        state_lengths={LINEAR: _GRANITE_MAMBA.state_length},
        rotates=lambda config, index: config.position_embedding_type == "rope",
        mlp="shared_mlp",
        gate_up=("input_linear",),
        down="output_linear",
        inner="shared_intermediate_size",
        mlp_bias=False,
        moe=Moe(
            module="block_sparse_moe",
            router="router",
            scoring="softmax_of_top",
            shared_inner=lambda config: int(config.shared_intermediate_size),
            in_layer=lambda config, index: config.num_local_experts > 0,
        ),
    ),
    "mamba2": replace(
        BARE,
        architecture="Mamba2ForCausalLM",
        entries={
            **_BOUNDS,
            "intermediate_size": 0,
            "num_attention_heads": None,
            "max_position_embeddings": None,
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            "vocab_size": 32768,
            "layer_norm_epsilon": 1e-5,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
        },
        derive=_derive_mamba2,
        layer_types=frozenset({LINEAR}),
        base="backbone.",
        embedding="embeddings",
        stored_as=(("embeddings.", "embedding."),),
        eps="layer_norm_epsilon",
        final_norm="norm_f",
        attention_norm="norm",
        mamba=_MAMBA2,
        state_lengths={LINEAR: _MAMBA2.state_length},
        has_single_halves=True,
        rotates=_never,
    ),
    "nemotron_h": replace(
        BARE,
        architecture="NemotronHForCausalLM",
        entries={
            "num_hidden_layers": None,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": None,
            "hybrid_override_pattern": None,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        aliases={
            "layers_block_type": "layer_types",
            "num_local_experts": "n_routed_experts",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_dt_min": "time_step_min",
            "mamba_conv_bias": "use_conv_bias",
        },
        derive=_derive_nemotron,
        layer_types=frozenset({*_LAYERS, "mlp", "moe"}),
        stored_as=(("model.", "backbone."),),
        unused=(r"^mtp\.",),
        embedding="embeddings",
        eps="layer_norm_epsilon",
        final_norm="norm_f",
        attention_norm="norm",
        attention="mixer",
        mamba=_NEMOTRON_MAMBA,
        state_lengths={LINEAR: _NEMOTRON_MAMBA.state_length},
        has_single_halves=True,
        rotates=_never,
        mlp="mixer",
        has_gate=False,
        gate_up=("up_proj",),
        mlp_bias="mlp_bias",
        activation="mlp_hidden_act",
        moe=replace(
            DEEPSEEK_MOE,
            parts=("up_proj", "down_proj"),
            shared_inner=lambda config: int(config.moe_shared_expert_intermediate_size),
            latent=lambda config: config.moe_latent_size,
            in_layer=lambda config, index: config.layer_types[index] == "moe",
        ),
    ),
}
"""Families by `model_type`."""
