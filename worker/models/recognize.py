"""Recognizer: reads one rank's parallelized Hugging Face model as a decoder layout, or says why it cannot."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.executors.layout import (
    Activation,
    Attention,
    Beside,
    DecoderLayout,
    Experts,
    Layer,
    Linear,
    Mlp,
    Norm,
    Rotary,
)
from holdfast.worker.executors.slices import slices_of_rank
from holdfast.worker.models import read
from holdfast.worker.models.experts import Experts as StoredExperts
from holdfast.worker.models.linear import ScaledEmbedding, VocabParallelEmbedding, VocabParallelHead
from holdfast.worker.models.read import NotReadable
from holdfast.worker.models.recognized_families import FAMILIES, Family, Moe, QkvPacking

_ROPE_TYPES: Final = {"default", "linear", "proportional", "llama3", "yarn", "ntk_alpha", "dynamic", "longrope"}
"""Angles are a function of the position alone; of the last two, up to the length that a model is served with at most
(`worker/models/checks.py`)."""

_NORMS_BESIDE: Final = ("norm", "out_norm", "mlp_out_norm")

_CLAMP: Final = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""The constants of `Activation.CLAMPED_SWIGLU`, by their names in a config."""


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
        self._hidden_size = int(module.config.hidden_size)

    def layout(self) -> DecoderLayout:
        family, config = self._family, self._config
        if getattr(config, "hidden_size_per_layer_input", None):
            raise NotReadable("its layers have inputs of their own beside the hidden states")
        if getattr(config, "clip_qkv", None) is not None:
            raise NotReadable("its queries, keys and values are clipped")
        table, scale = self._embedding()
        head = self._head()
        rotaries = self._rotaries()
        return DecoderLayout(
            dtype=table.dtype,
            hidden_size=self._hidden_size,
            vocab_size=head.vocab_size,
            embedding=table,
            embedding_scale=scale * family.embedding_scale(config),
            rotaries=tuple(rotaries.values()),
            layers=tuple(self._layer(layer, tuple(rotaries)) for layer in self._layers()),
            norm=self._norm(read.child(self._base, family.final_norm)),
            head=read.stacked([head.linear]),
            logit_scale=family.logit_scale(config),
            logit_softcap=None if family.logit_softcap is None else getattr(config, family.logit_softcap),
        )

    def _layers(self) -> list[Any]:
        return list(self._base.layers)[: self._config.num_hidden_layers]

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

    def _rotaries(self) -> Mapping[str, Rotary]:
        """By type of layer; under the empty name where there is one for all."""
        module = read.child(self._base, "rotary_emb")
        types = module.rope_type if isinstance(module.rope_type, Mapping) else {"": module.rope_type}
        if unknown := set(types.values()) - _ROPE_TYPES:
            raise NotReadable(f"its rotary angles are of kind {', '.join(sorted(unknown))}")
        return {name: self._rotary(module, f"{name}_" if name else "") for name in types}

    def _rotary(self, module: Any, prefix: str) -> Rotary:
        return Rotary(
            inverse_frequencies=read.child(module, f"{prefix}original_inv_freq").float(),
            scaling=float(read.child(module, f"{prefix}attention_scaling")),
            interleaved=self._family.interleaved,
        )

    def _layer(self, layer: Any, rotaries: tuple[str, ...]) -> Layer:
        family = self._family
        parallel = family.parallel(self._config)
        shares_norm = parallel and family.shared_norm
        return Layer(
            attention_norm=self._optional_norm(layer, family.attention_norm),
            attention=self._attention(read.child(layer, family.attention), rotaries),
            attention_out_norm=self._optional_norm(layer, family.attention_out_norm),
            mlp_norm=None if shares_norm else self._optional_norm(layer, family.mlp_norm),
            mlp=self._mlp_or_experts(read.child(layer, family.mlp)),
            beside=self._beside(layer),
            mlp_out_norm=self._optional_norm(layer, family.mlp_out_norm),
            residual_scale=family.residual_scale(self._config),
            output_scale=1.0 if family.output_scale is None else float(read.inner_tensor(layer, family.output_scale)),
            parallel=parallel,
        )

    def _beside(self, layer: Any) -> Beside | None:
        beside = self._family.beside
        if beside is None or not hasattr(layer, "experts"):
            return None
        norms = {name: self._norm(read.child(layer, getattr(beside, name))) for name in _NORMS_BESIDE}
        scale = read.inner_tensor(layer, beside.router_scale) * self._hidden_size**-0.5
        router_norm = replace(norms["norm"], weight=scale, eps=float(read.child(layer, beside.moe.router).eps))
        return Beside(experts=self._experts(layer, beside.moe), router_norm=router_norm, **norms)

    def _optional_norm(self, layer: Any, name: str | None) -> Norm | None:
        return None if name is None else self._norm(read.child(layer, name))

    def _norm(self, module: Any) -> Norm:
        return read.norm(module, self._family.norm, self._hidden_size)

    def _attention(self, module: Any, rotaries: tuple[str, ...]) -> Attention:
        family = self._family
        if not getattr(module, "is_causal", True):
            raise NotReadable("its attention is not causal")
        head_dim = int(read.child(module, family.head_dim))
        qkv = self._qkv(self._qkv_modules(module), head_dim)
        output = read.rows(read.child(module, family.output), self._size)
        num_heads = output.in_features // head_dim
        sinks = getattr(module, "sinks", None)
        return Attention(
            num_heads=num_heads,
            num_kv_heads=(qkv.out_features // head_dim - num_heads) // 2,
            head_dim=head_dim,
            qkv=qkv,
            query_norm=self._head_norm(module, family.query_norm, head_dim),
            key_norm=self._head_norm(module, family.key_norm, head_dim),
            norms_after_rotation=family.norms_after_rotation,
            value_norm=None if family.value_norm is None else self._value_norm(module, head_dim),
            query_scale=family.query_scale(self._config),
            rotary=self._rotary_index(module, rotaries),
            scaling=float(module.scaling),
            sliding_window=family.window(module),
            softcap=None if family.softcap is None else getattr(self._config, family.softcap),
            sinks=None if sinks is None else sinks.detach().float(),
            output=output,
            num_slices=self._slices(num_heads),
        )

    def _qkv_modules(self, module: Any) -> list[Any]:
        """The last two are one where values are keys before norm and rotation."""
        modules = [read.child(module, name) for name in self._family.qkv if getattr(module, name, self) is not None]
        is_shared = len(modules) == 2 and getattr(module, "use_alternative_attention", False)
        return [*modules, modules[1]] if is_shared else modules

    def _value_norm(self, module: Any, head_dim: int) -> Norm:
        """A norm without weights."""
        assert self._family.value_norm is not None
        norm = read.child(module, self._family.value_norm)
        if list(norm.parameters()) or norm.with_scale:
            raise NotReadable("the norm of its values has weights")
        return Norm(kind="rms", weight=torch.ones(head_dim), eps=float(norm.eps))

    def _qkv(self, modules: list[Any], head_dim: int) -> Linear:
        if self._family.packing is QkvPacking.HEAD_BY_HEAD:
            return read.head_by_head(read.column_parallel(modules[0], self._size), head_dim)
        return read.columns(modules, self._size)

    def _head_norm(self, module: Any, name: str, head_dim: int) -> Norm | None:
        found = getattr(module, name, None)
        return None if found is None else read.norm(found, self._family.norm, head_dim)

    def _rotary_index(self, attention: Any, rotaries: tuple[str, ...]) -> int | None:
        if not self._family.rotates(attention):
            return None
        if rotaries == ("",):
            return 0
        layer_type = self._config.layer_types[attention.layer_idx]
        if layer_type not in rotaries:
            raise NotReadable(f"its {layer_type} layers have no rotary angles")
        return rotaries.index(layer_type)

    def _mlp_or_experts(self, module: Any) -> Mlp | Experts:
        has_experts = hasattr(module, "experts")
        if has_experts and self._family.moe is None:
            raise NotReadable("it has experts, which its family should not have")
        return self._experts(module, self._family.moe) if has_experts and self._family.moe else self._mlp(module)

    def _mlp(self, module: Any) -> Mlp:
        family = self._family
        up = read.columns([read.child(module, name) for name in family.gate_up], self._size)
        down = read.rows(read.child(module, family.down), self._size)
        activation = read.activation(read.child(module, family.activation))
        return self._checked(
            Mlp(
                activation=activation,
                has_gate=family.has_gate,
                up=up,
                down=down,
                num_slices=self._slices(down.in_features),
            )
        )

    def _experts(self, module: Any, moe: Moe) -> Experts:
        experts = read.child(module, "experts")
        if not isinstance(experts, StoredExperts):
            raise NotReadable(f"its experts are {type(experts).__name__}")
        if self._size > 1 and not experts.is_partial:
            raise NotReadable("its experts are not split over ranks")
        router, top_k = read.router(read.child(module, moe.router))
        return Experts(
            router=router,
            top_k=top_k,
            scoring=moe.scoring,
            selection_bias=None if moe.selection_bias is None else read.inner_tensor(module, moe.selection_bias),
            num_groups=moe.num_groups(self._config),
            top_groups=moe.top_groups(self._config),
            normalized=moe.normalized(self._config),
            least_sum=moe.least_sum(self._config),
            scales=self._scales(module, moe, len(experts.up)),
            experts=tuple(
                self._expert(up, down, experts, moe) for up, down in zip(experts.up, experts.down, strict=True)
            ),
            shared=self._shared(module, moe),
            shared_gate=self._shared_gate(module, moe),
        )

    def _expert(self, up: Any, down: Any, experts: StoredExperts, moe: Moe) -> Mlp:
        if moe.clamped:
            if any(getattr(self._config, name, None) != value for name, value in _CLAMP.items()):
                raise NotReadable("its experts have a clamped SwiGLU with other constants")
            activation = Activation.CLAMPED_SWIGLU
        else:
            activation = read.activation(experts.activation)
        return self._checked(
            Mlp(
                activation=activation,
                has_gate=experts.has_gate,
                up=read.interleaved(up) if moe.clamped else read.stacked([up]),
                down=read.stacked([down]),
                num_slices=self._slices(down.in_features),
            )
        )

    def _scales(self, module: Any, moe: Moe, num_experts: int) -> Tensor | None:
        if moe.scales is not None:
            return read.inner_tensor(module, moe.scales)
        scale = moe.scale(self._config)
        return None if scale == 1.0 else torch.full((num_experts,), scale)

    def _shared(self, module: Any, moe: Moe) -> Mlp | None:
        """The expert of all tokens; none where the module says that there is none."""
        if moe.shared is None or getattr(module, moe.shared, self) is None:
            return None
        return self._mlp(read.child(module, moe.shared))

    def _shared_gate(self, module: Any, moe: Moe) -> Tensor | None:
        if moe.shared_gate is None:
            return None
        gate = read.child(module, moe.shared_gate)
        return read.stacked([gate]).weights[0]

    def _checked(self, mlp: Mlp) -> Mlp:
        expected = (1 + mlp.has_gate) * mlp.down.in_features
        if mlp.up.out_features != expected:
            raise NotReadable(f"an MLP has {mlp.up.out_features} inner features where {expected} were expected")
        return mlp

    def _slices(self, local: int) -> int:
        """Of one rank's share of heads, or inputs, which all ranks share evenly."""
        num_heads = int(self._config.num_attention_heads)
        return slices_of_rank(local * self._size, num_heads, num_heads, 0, self._size)
