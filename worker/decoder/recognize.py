"""Recognizer: reads one rank's parallelized Hugging Face model as a decoder layout, or says why it cannot.

What may live here: the way from a tree of modules to a layout. What may not: what families look like (`families.py`),
single modules (`read.py`), and whether the layout computes the same (`proof.py`).
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

from torch import Tensor

from holdfast.worker.decoder import read
from holdfast.worker.decoder.families import FAMILIES, Family
from holdfast.worker.decoder.layout import NUM_SLICES, Attention, DecoderLayout, Layer, Mlp, Norm, Rotary
from holdfast.worker.decoder.read import NotReadable
from holdfast.worker.layers.embedding import ScaledEmbedding, VocabParallelEmbedding, VocabParallelHead


@dataclass(frozen=True, slots=True)
class Unrecognized:
    """The model is no decoder layout."""

    reason: str
    """For the log: what about it is not understood."""


def recognize(module: Any, size: int) -> DecoderLayout | Unrecognized:
    """The layout of `module`, a parallelized Hugging Face causal LM that is not settled, on one of `size` ranks.

    Its tensors are those of the modules, most of them views of the checkpoint's memory.
    """
    family = FAMILIES.get(module.config.model_type)
    if family is None:
        return Unrecognized(f"model type {module.config.model_type!r} is not among the known families")
    try:
        return _Reader(module, family, size).layout()
    except NotReadable as reason:
        return Unrecognized(str(reason))


class _Reader:
    """Reads one model of a family."""

    def __init__(self, module: Any, family: Family, size: int) -> None:
        self._module = module
        self._config = module.config
        self._base = module.base_model
        self._family = family
        self._size = size

    def layout(self) -> DecoderLayout:
        table, scale = self._embedding()
        family, config = self._family, self._config
        return DecoderLayout(
            dtype=table.dtype,
            hidden_size=int(table.shape[1]),
            vocab_size=self._head().vocab_size,
            embedding=table,
            embedding_scale=scale * family.embedding_scale(config),
            rotaries=(self._rotary(),),
            layers=tuple(self._layer(layer) for layer in self._base.layers),
            norm=self._norm(read.child(self._base, family.final_norm)),
            head=read.stacked([self._head().linear]),
            logit_scale=family.logit_scale(config),
            logit_softcap=family.logit_softcap(config),
        )

    def _embedding(self) -> tuple[Tensor, float]:
        module: Any = self._module.get_input_embeddings()
        scale = 1.0
        if isinstance(module, ScaledEmbedding):
            module, scale = module.embedding, module.scale.item()
        if not isinstance(module, VocabParallelEmbedding):
            raise NotReadable(f"its embedding is a {type(module).__name__}")
        return module.weight, scale

    def _head(self) -> VocabParallelHead:
        head = self._module.get_output_embeddings()
        if not isinstance(head, VocabParallelHead):
            raise NotReadable(f"its head is a {type(head).__name__}")
        return head

    def _rotary(self) -> Rotary:
        module = read.child(self._base, "rotary_emb")
        inverse_frequencies = read.child(module, "original_inv_freq").float()
        scaling = float(module.attention_scaling)
        return Rotary(inverse_frequencies=inverse_frequencies, scaling=scaling, interleaved=self._family.interleaved)

    def _layer(self, layer: Any) -> Layer:
        family = self._family
        return Layer(
            attention_norm=self._optional_norm(layer, family.attention_norm),
            attention=self._attention(read.child(layer, family.attention)),
            attention_out_norm=self._optional_norm(layer, family.attention_out_norm),
            mlp_norm=self._optional_norm(layer, family.mlp_norm),
            mlp=self._mlp(read.child(layer, family.mlp)),
            mlp_out_norm=self._optional_norm(layer, family.mlp_out_norm),
            residual_scale=family.residual_scale(self._config),
        )

    def _optional_norm(self, layer: Any, name: str | None) -> Norm | None:
        return None if name is None else self._norm(read.child(layer, name))

    def _norm(self, module: Any) -> Norm:
        return read.norm(module, self._family.norm, self._family.norm_offset)

    def _attention(self, module: Any) -> Attention:
        family = self._family
        parts = [read.child(module, name) for name in family.qkv]
        qkv = read.columns(parts, self._size)
        output = read.rows(read.child(module, family.output), self._size)
        head_dim = int(module.head_dim)
        num_heads = output.in_features // head_dim
        num_kv_heads = (qkv.out_features // head_dim - num_heads) // 2
        query_norm = read.optional_child(module, family.query_norm)
        key_norm = read.optional_child(module, family.key_norm)
        return Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv=qkv,
            query_norm=None if query_norm is None else self._norm(query_norm),
            key_norm=None if key_norm is None else self._norm(key_norm),
            rotary=0,
            scaling=float(module.scaling),
            sliding_window=getattr(module, "sliding_window", None),
            output=output,
            num_slices=self._slices(num_heads),
        )

    def _mlp(self, module: Any) -> Mlp:
        family = self._family
        up = read.columns([read.child(module, name) for name in family.gate_up], self._size)
        down = read.rows(read.child(module, family.down), self._size)
        return Mlp(
            activation=read.activation(read.child(module, family.activation)),
            has_gate=family.has_gate,
            up=up,
            down=down,
            num_slices=self._slices(down.in_features),
        )

    def _slices(self, local: int) -> int:
        """Slices of this rank's share of `local` heads, or inputs: whole subtrees of the whole model's slices."""
        whole = gcd(NUM_SLICES, local * self._size)
        return whole // self._size if whole % self._size == 0 else 1
