"""MLPs and mixtures of experts of stated families, as parts of a decoder layout."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.executors.coded import UNIT
from holdfast.worker.executors.layout import Activation, Beside, Experts, LayerInput, Mlp, TokenInputs
from holdfast.worker.executors.linears import Linear
from holdfast.worker.models.family import Moe, is_set
from holdfast.worker.models.quantizing_tensors import PlainExperts
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.stated_config import NotStated
from holdfast.worker.models.stated_latent_experts import LatentExperts
from holdfast.worker.models.stated_tensors import Weight

_ACTIVATIONS: Final = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
"""Activations by their names in config.json."""


class MlpBuilder:
    """Builds the part of a layer after attention."""

    def __init__(self, share: RankShare) -> None:
        """Raises `NotStated` for an activation that no layout can say."""
        self._share = share
        self._config, self._family = share.config, share.family
        name = getattr(self._config, self._family.activation)
        if name not in _ACTIVATIONS:
            raise NotStated(f"its activation is {name!r}")
        self._activation = _ACTIVATIONS[name]

    def build(self, index: int, prefix: str) -> Mlp | Experts:
        """MLP or experts of one layer, whose tensors have names with this prefix."""
        moe, own = self._family.moe, f"{prefix}{self._family.mlp}." if self._family.mlp else prefix
        if moe is None or not moe.in_layer(self._config, index):
            inner = getattr(self._config, self._family.inner)
            return self._mlp(own, inner * self._family.inner_factor(self._config, index))
        if moe.module is None:
            return self._experts(moe, own, f"{own}{moe.shared}.")
        return self._experts(moe, f"{prefix}{moe.module}.", own)

    def _mlp(
        self,
        prefix: str,
        inner: int,
        names: tuple[str, ...] | None = None,
        *,
        may_stay: bool = True,
        is_clamped: bool = False,
    ) -> Mlp:
        """`names` of gate, up and down, if they are not the family's. `is_clamped`: it is an expert of gpt-oss."""
        family, share, hidden = self._family, self._share, self._config.hidden_size
        *gate_up, down = names or (*family.gate_up, family.down)
        is_expert = names is not None and not family.has_gate  # which have no biases
        has_bias = is_clamped or (is_set(family.mlp_bias, self._config) and not is_expert)
        slices = share.slices(inner)
        outputs = [(inner, None)] * (1 + family.has_gate)
        gate_scale, inner_scale = family.mlp_scales(self._config)
        up = share.columns(
            [prefix + one for one in gate_up], outputs, hidden, has_bias=has_bias, may_stay=may_stay, together=UNIT
        )
        whole_down = share.rows(prefix + down, (hidden, inner), slices, has_bias=has_bias, may_stay=may_stay)
        if whole_down.bias is not None:
            bias = whole_down.bias * inner_scale
            whole_down = replace(whole_down, bias=bias if names is None else self._of_first_rank(bias))
        return Mlp(
            activation=Activation.CLAMPED_SWIGLU if is_clamped else self._activation,
            has_gate=family.has_gate,
            gate_scale=gate_scale,
            inner_scale=inner_scale,
            up=up,
            down=whole_down,
            num_slices=slices,
        )

    def _experts(self, moe: Moe, prefix: str, shared_prefix: str = "") -> Experts:
        config, share, hidden = self._config, self._share, self._config.hidden_size
        count = getattr(config, moe.num_experts)
        if not (top_k := getattr(config, moe.top_k)):
            raise NotStated(f"config.json has {moe.top_k} = {top_k}, and layers with experts")
        if not count:
            raise NotStated(f"it has {moe.num_experts} = {count} in a layer with experts")
        router = share.whole(prefix + moe.router, (count, hidden), has_bias=moe.has_router_bias, exact=moe.exact_router)
        shared_inner, latent = moe.shared_inner(config), moe.latent(config)
        shared = self._mlp(shared_prefix, shared_inner) if shared_inner else None
        of_latents = None if latent is None else LatentExperts(share, moe, prefix, latent)
        if of_latents is None:
            experts = self._experts_together(moe, prefix + "experts.", count)
        else:
            experts, shared = of_latents.experts(count, self._activation), of_latents.with_sum(shared)
        gate = None if moe.shared_gate is None else share.whole(prefix + moe.shared_gate, (1, hidden))
        return Experts(
            router=router,
            top_k=top_k,
            scoring=moe.scoring,
            selection_bias=self._selection_bias(moe, prefix, count),
            num_groups=moe.num_groups(config),
            top_groups=moe.top_groups(config),
            group_best=moe.group_best,
            normalized=is_set(moe.normalized, config),
            least_sum=moe.least_sum(config),
            scales=self._scales(moe, prefix, count),
            experts=experts,
            shared=shared,
            shared_gate=gate,
            latent=None if of_latents is None else of_latents.input(),
        )

    def input(self, prefix: str) -> LayerInput | None:
        """The part of a layer that takes its own input, if the model has them."""
        own, share, hidden = self._family.own_inputs, self._share, self._config.hidden_size
        if own is None or not (dim := getattr(self._config, own.dim)):
            return None
        return LayerInput(
            gate=share.whole(prefix + own.gate, (dim, hidden)),
            activation=self._activation,
            projection=share.whole(prefix + own.projection, (hidden, dim)),
            norm=share.norm(prefix + own.norm, (hidden,), has_bias=False),
        )

    def token_inputs(self) -> TokenInputs | None:
        """The inputs of all layers, if the model has them. Raises `NotStated` if some tokens have none."""
        own, config, share = self._family.own_inputs, self._config, self._share
        if own is None or not (dim := getattr(config, own.dim)):
            return None
        base, columns, rows = self._family.base, config.num_hidden_layers * dim, getattr(config, own.vocabulary)
        if rows < config.vocab_size:
            raise NotStated(f"its layers have inputs for {rows} tokens of {config.vocab_size}")
        return TokenInputs(
            table=share.table_of_rows(share.tensors.take(f"{base}{own.table}.weight", (rows, columns))),
            context=share.whole(base + own.context, (columns, config.hidden_size)),
            norm=share.norm(base + own.context_norm, (dim,), has_bias=False),
            dim=dim,
            table_scale=share.rounded_scale(dim**0.5),
            context_scale=config.hidden_size**-0.5,
            scale=2.0**-0.5,
        )

    def beside(self, prefix: str) -> Beside | None:
        """The mixture beside the MLP of the layer whose names begin so, if the model has some."""
        beside, share, hidden = self._family.beside, self._share, self._config.hidden_size
        if beside is None or not is_set(beside.is_there, self._config):
            return None
        norm = share.norm(prefix + beside.norm, (hidden,), has_bias=False)
        weight = share.floats(share.tensors.take(prefix + beside.router_scale, (hidden,))) * hidden**-0.5
        return Beside(
            experts=self._experts(beside.moe, prefix),
            norm=norm,
            router_norm=replace(norm, weight=weight),
            out_norm=share.norm(prefix + beside.out_norm, (hidden,), has_bias=False),
            mlp_out_norm=share.norm(prefix + beside.mlp_out_norm, (hidden,), has_bias=False),
        )

    def _scales(self, moe: Moe, prefix: str, count: int) -> Tensor | None:
        if moe.scales is not None:
            return self._share.floats(self._share.tensors.take(prefix + moe.scales, (count,)))
        scale = moe.scale(self._config)
        return None if scale == 1.0 else torch.full((count,), scale)

    def _selection_bias(self, moe: Moe, prefix: str, count: int) -> Tensor | None:
        if moe.selection_bias is None or not is_set(moe.has_selection_bias, self._config):
            return None
        return self._share.vector(prefix + moe.selection_bias, (1, count) if moe.is_row else (count,))

    def _experts_together(self, moe: Moe, prefix: str, count: int) -> tuple[Mlp, ...]:
        """Experts from one tensor for all; or one by one, if there is none."""
        inner, hidden = getattr(self._config, moe.inner), self._config.hidden_size
        first, length = self._share.part(inner)
        if not self._family.has_gate:
            return self._experts_without_gates(moe, prefix, count)
        transposed = moe.clamped or is_set(moe.transposed, self._config)
        up = self._stack(f"{prefix}gate_up_proj", (count, 2 * inner, hidden), transposed=transposed)
        if up is None:
            one = partial(self._mlp, may_stay=self._share.keeps_units, is_clamped=moe.clamped)
            return tuple(one(f"{prefix}{number}.", inner, moe.parts) for number in range(count))
        down = self._stack(f"{prefix}down_proj", (count, hidden, inner), transposed=transposed)
        if down is None:
            raise NotStated(f"the tensor {prefix}down_proj is missing")
        if not moe.clamped:
            return tuple(self._expert(up[number], down[number], inner) for number in range(count))
        up_biases = self._biases(f"{prefix}gate_up_proj_bias", (count, 2 * inner))
        down_biases = self._biases(f"{prefix}down_proj_bias", (count, hidden))
        return tuple(
            Mlp(
                activation=Activation.CLAMPED_SWIGLU,
                has_gate=True,
                up=_gate_and_up_in_turns(self._share.numbers(up[number]), up_biases[number], first, length),
                down=Linear(
                    weights=(self._share.numbers(down[number]).narrow(1, first, length),),
                    bias=self._of_first_rank(down_biases[number]),
                ),
                num_slices=self._share.slices(inner),
            )
            for number in range(count)
        )

    def _expert(self, gate_up: Weight, down: Weight, inner: int) -> Mlp:
        """One expert of a stack, all of whose gates lie before its ups."""
        share, (first, length), slices = self._share, self._share.part(inner), self._share.slices(inner)
        parts = [gate_up.narrow(0, start + first, length) for start in (0, inner)]
        return Mlp(
            activation=self._activation,
            has_gate=True,
            up=share.stacked(parts, may_stay=share.keeps_units, together=UNIT),
            down=share.of_inputs(down.narrow(1, first, length), slices, may_stay=share.keeps_units),
            num_slices=slices,
        )

    def _experts_without_gates(self, moe: Moe, prefix: str, count: int) -> tuple[Mlp, ...]:
        inner, hidden = getattr(self._config, moe.inner), self._config.hidden_size
        first, length = self._share.part(inner)
        up = self._stack(f"{prefix}up_proj", (count, inner, hidden), transposed=False)
        if up is None:
            stay = self._share.keeps_units
            return tuple(self._mlp(f"{prefix}{number}.", inner, moe.parts, may_stay=stay) for number in range(count))
        down = self._stack(f"{prefix}down_proj", (count, hidden, inner), transposed=False)
        if down is None:
            raise NotStated(f"the tensor {prefix}down_proj is missing")
        return tuple(
            Mlp(
                activation=self._activation,
                has_gate=False,
                up=Linear(weights=(up[number].narrow(0, first, length),)),
                down=Linear(weights=(down[number].narrow(1, first, length),)),
                num_slices=self._share.slices(inner),
            )
            for number in range(count)
        )

    def _stack(self, name: str, shape: tuple[int, int, int], *, transposed: bool) -> Sequence[Any] | Tensor | None:
        """The weight [out, in] of each expert of the whole model; stored [experts, in, out], if `transposed`."""
        count, out_features, in_features = shape
        found: Any = self._share.tensors.find(name, (count, in_features, out_features) if transposed else shape)
        if found is None:
            return None
        if isinstance(found, PlainExperts):
            return found.experts
        numbers = self._share.numbers(found)
        return numbers.transpose(1, 2) if transposed else numbers

    def _biases(self, name: str, shape: tuple[int, int]) -> Any:
        return self._share.floats(self._share.tensors.take(name, shape))

    def _of_first_rank(self, bias: Tensor) -> Tensor:
        """The bias of an expert's outputs on this rank: the results of all ranks are added."""
        return bias if self._share.rank == 0 else torch.zeros_like(bias)


def _gate_and_up_in_turns(weight: Tensor, bias: Tensor | None, first: int, length: int) -> Linear:
    """A rank's share of the outputs of one expert [gate and up, in]: gate, up, gate, up, ..."""
    parts = [weight[start : 2 * (first + length) : 2] for start in (2 * first, 2 * first + 1)]
    biases = [] if bias is None else [bias[start : 2 * (first + length) : 2] for start in (2 * first, 2 * first + 1)]
    return Linear(weights=tuple(parts), bias=torch.cat(biases) if biases else None)
