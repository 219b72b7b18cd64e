"""Encoders, stated: families whose tokens see those behind them too. Their states are pooled (docs/embeddings.md)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from holdfast.worker.models.encoder import Encoder, HeadPart
from holdfast.worker.models.family import Family, NormKind, Packing, Windows
from holdfast.worker.models.family_rules import layer_types

_HEADS: Final = (r"^(\w+\.)?pooler\.", r"^(classifier|cls|lm_head|head|decoder)\.", r"\.(position|token_type)_ids$")
"""Tensors behind the last hidden state, which `pooled_layers.py` reads, and constants of old checkpoints."""

BERT: Final = Family(
    architecture="BertModel",
    entries={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    },
    fixed={
        "position_embedding_type": (None, "absolute"),
        "is_decoder": (None, False),
        "add_cross_attention": (None, False),
    },
    base="bert.",
    embedding="embeddings.word_embeddings",
    layers="encoder.layer.",
    stored_as=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
    unused=_HEADS,
    norm=NormKind.LAYER,
    norm_bias=True,
    eps="layer_norm_eps",
    attention_norm="output.LayerNorm",
    mlp_norm="attention.output.LayerNorm",
    attention="attention",
    qkv=("self.query", "self.key", "self.value"),
    qkv_bias=True,
    output="output.dense",
    output_bias=True,
    rotates=lambda config, index: False,
    mlp="",
    has_gate=False,
    gate_up=("intermediate.dense",),
    down="output.dense",
    mlp_bias=True,
    encoder=Encoder(
        embedding_norm="embeddings.LayerNorm",
        norms_stay=True,
        positions="embeddings.position_embeddings",
        segments="embeddings.token_type_embeddings",
        head=lambda raw: (HeadPart("pooler.dense", "tanh"), HeadPart("classifier")),
    ),
)


def _derive_roberta(config: Any) -> None:
    """Positions begin behind that of padding."""
    config.first_position = config.pad_token_id + 1
    config.max_position_embeddings -= config.first_position


def _roberta_head(raw: Mapping[str, Any]) -> tuple[HeadPart, ...]:
    return HeadPart("classifier.dense", "tanh"), HeadPart("classifier.out_proj")


ROBERTA: Final = replace(
    BERT,
    architecture="RobertaModel",
    entries={**BERT.entries, "pad_token_id": 1, "eos_token_id": 2},
    derive=_derive_roberta,
    base="roberta.",
    encoder=Encoder(
        embedding_norm="embeddings.LayerNorm",
        norms_stay=True,
        positions="embeddings.position_embeddings",
        segments="embeddings.token_type_embeddings",
        has_second_segment=False,
        head=_roberta_head,
    ),
)


def _derive_modernbert(config: Any) -> None:
    """The window has half of `local_attention` on either side of a token."""
    every = config.global_attn_every_n_layers
    config.sliding_window = config.local_attention // 2 + 1
    layer_types(lambda config, index: bool(index % every))(config)


def _modernbert_head(raw: Mapping[str, Any]) -> tuple[HeadPart, ...]:
    return (
        HeadPart("head.dense", str(raw.get("classifier_activation", "gelu"))),
        HeadPart("head.norm", eps=float(raw.get("norm_eps", 1e-5))),
        HeadPart("classifier"),
    )


MODERNBERT: Final = Family(
    architecture="ModernBertModel",
    entries={
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "layer_types": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 50282,
    },
    derive=_derive_modernbert,
    fixed={"rope_scaling": (None,)},
    aliases={"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"},
    embedding="embeddings.tok_embeddings",
    unused=_HEADS,
    norm=NormKind.LAYER,
    norm_bias="norm_bias",
    eps="norm_eps",
    final_norm="final_norm",
    attention_norm="attn_norm",
    mlp_norm="mlp_norm",
    attention="attn",
    packing=Packing.FUSED,
    qkv=("Wqkv",),
    qkv_bias="attention_bias",
    output="Wo",
    output_bias="attention_bias",
    windows=Windows.BY_TYPE,
    theta=160_000.0,
    local_theta=10_000.0,
    gate_up=("Wi",),
    down="Wo",
    mlp_bias="mlp_bias",
    activation="hidden_activation",
    encoder=Encoder(
        embedding_norm="embeddings.norm",
        head=_modernbert_head,
        kind=lambda raw: str(raw.get("classifier_pooling", "cls")),
    ),
)

ENCODERS: Final[Mapping[str, Family]] = {
    "bert": BERT,
    "camembert": replace(ROBERTA, architecture="CamembertModel"),
    "modernbert": MODERNBERT,
    "roberta": ROBERTA,
    "xlm-roberta": replace(ROBERTA, architecture="XLMRobertaModel"),
}
"""Encoders by `model_type` of config.json."""
