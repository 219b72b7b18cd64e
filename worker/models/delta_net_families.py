"""Families with Gated DeltaNet layers, stated (`families.py`): Qwen3.5, 3.6 and Qwen3-Next."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from holdfast.worker.executors.layout_arithmetic import delta_state_length
from holdfast.worker.models.family import DeltaPacking, Family, HeadNorms, Moe, NextToken, NormKind
from holdfast.worker.models.family_rules import is_sparse


def _derive(config: Any) -> None:
    """Attention is in each layer whose number is a multiple of the interval."""
    if config.layer_types is None:
        config.layer_types = [
            "linear_attention" if (index + 1) % config.full_attention_interval else "full_attention"
            for index in range(config.num_hidden_layers)
        ]


def _state_length(config: Any, num_drafts: int) -> int:
    return delta_state_length(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim - 1 + num_drafts,
    )


_DENSE: Final = Family(
    architecture="Qwen3_5ForCausalLM",
    entries={
        "attention_bias": False,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "eos_token_id": None,
        "layer_types": None,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    derive=_derive,
    layer_types=frozenset({"full_attention", "linear_attention"}),
    unused=(r"^mtp\.",),
    next_token=NextToken(
        base=lambda config: "mtp.",
        layer="layers.0.",
        input="fc",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        norm="norm",
    ),
    norm=NormKind.RMS_PLUS_ONE,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    head_norms=HeadNorms.ONE_FOR_EACH,
    state_lengths={"linear_attention": _state_length},
    delta_net=DeltaPacking.BY_KIND,
    has_output_gate=True,
    partial=0.25,
)
_EXPERTS: Final = {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_MOE: Final = Moe(
    num_experts="num_experts",
    inner="moe_intermediate_size",
    shared="shared_expert",
    shared_inner=lambda config: int(config.shared_expert_intermediate_size),
    shared_gate="shared_expert_gate",
)

DELTA_NETS: Final[Mapping[str, Family]] = {
    "qwen3_5_moe_text": replace(
        _DENSE,
        architecture="Qwen3_5MoeForCausalLM",
        entries={**_DENSE.entries, **_EXPERTS, "intermediate_size": 0},
        moe=_MOE,
    ),
    "qwen3_5_text": _DENSE,
    "qwen3_next": replace(
        _DENSE,
        architecture="Qwen3NextForCausalLM",
        entries={
            **_DENSE.entries,
            **_EXPERTS,
            "intermediate_size": 5632,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": True,
        },
        delta_net=DeltaPacking.BY_KEY_HEAD,
        moe=replace(_MOE, normalized="norm_topk_prob", in_layer=is_sparse),
    ),
}
"""Families by `model_type`."""
