"""Decoder layout of a stated family: one rank's share, straight from config.json and the tensors of a checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.executors.layout import Attention, DecoderLayout, LatentAttention, Layer, Rotary
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.state_layers import GatedDeltaNet, Mamba2, ShortConv
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.checks import check_heads
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.family import DeltaPacking, HeadNorms, NextToken, Packing, is_set
from holdfast.worker.models.family_rules import head_dim, num_kv_heads
from holdfast.worker.models.model import serving_dtype
from holdfast.worker.models.model_facts import ModelFacts, facts_of
from holdfast.worker.models.quantized_activations import Kept, kept_form
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.rotary import make_rotary
from holdfast.worker.models.stated_config import NotStated, read_stated_config
from holdfast.worker.models.stated_encoder import EncoderBuilder
from holdfast.worker.models.stated_latent import latent_attention
from holdfast.worker.models.stated_mlp import MlpBuilder
from holdfast.worker.models.stated_states import LINEAR, DeltaNetBuilder, KimiDeltaBuilder, MambaBuilder, slices_beside
from holdfast.worker.models.stated_tensors import StoredTensors, Weight, stored_tensors
from holdfast.worker.models.text_model import POOLING_ENTRIES, served_config
from holdfast.worker.models.weights import read_json

_CPU: Final = torch.device("cpu")


def read_stated(
    config: ModelConfig, folder: Path, group: TensorParallelGroup, device: torch.device = _CPU
) -> tuple[DecoderLayout, ModelFacts] | str:
    """This rank's share of the checkpoint in `folder`, and the facts of its model; or the reason why Hugging Face's
    modules must run it, including errors. On CPUs shares of ranks may be unequal.
    """
    try:
        stated = stated_config_of(config, folder)
        facts = facts_of(stated, folder, config.max_model_len)
        if device.type != "cpu":
            check_heads(stated, group.size)
        dtype = serving_dtype(config, stated)
        tensors = stored_tensors(config, stated, folder, FAMILIES[stated.model_type])
        return stated_layout(stated, tensors, group, dtype, kept_form(config, device.type, dtype)), facts
    except (NotStated, ConfigurationError, UnsupportedModelError) as reason:
        return str(reason)


def stated_config_of(config: ModelConfig, folder: Path) -> Any:
    """The folder's config.json with the changes of the settings. Raises as `read_stated_config`."""
    changes = {key: value for key, value in config.config_changes.items() if key not in POOLING_ENTRIES}
    written = read_json(folder / "config.json")
    raw = {**served_config(written, folder), **changes}
    return read_stated_config(raw, config.hf_overrides.keys() - POOLING_ENTRIES)


def stated_layout(
    config: Any, tensors: StoredTensors, group: TensorParallelGroup, dtype: torch.dtype, kept: Kept = Kept.NUMBERS
) -> DecoderLayout:
    """This rank's share, to be served in `dtype`, of a model whose config was read by `stated_config.py`. `kept`: what
    quantized weights stay, where their form allows it.

    Raises `NotStated`, and `UnsupportedModelError` if this many ranks cannot share the model.
    """
    share = RankShare(config, FAMILIES[config.model_type], tensors, group, dtype, kept)
    layout = LayoutBuilder(share).layout()
    tensors.check_all_taken(config)
    return layout


class LayoutBuilder:
    """Builds one rank's share."""

    def __init__(self, share: RankShare) -> None:
        self._share = share
        self._config, self._family = share.config, share.family
        self._mlps = MlpBuilder(share)
        self._mambas = None if share.family.mamba is None else MambaBuilder(share, share.family.mamba)
        self._delta_nets = self._delta_net_builder()
        self._encoder = None if share.family.encoder is None else EncoderBuilder(share, share.family.encoder)

    def layout(self) -> DecoderLayout:
        """Layout of this rank: embedding, layers, last norm and head."""
        config, family, share = self._config, self._family, self._share
        shape = (config.vocab_size, config.hidden_size)
        table = share.tensors.take(f"{family.base}{family.embedding}.weight", shape)
        whole_head = self._own_head(table)
        bias = share.tensors.take("lm_head.bias", shape[:1]) if family.head_bias else None
        head = share.head(table if whole_head is None else whole_head, bias, is_table=whole_head is None)
        rotaries = self._rotaries()
        return DecoderLayout(
            dtype=share.dtype,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            embedding=share.embedding(table, head if whole_head is None else None),
            embedding_scale=self._embedding_scale() * family.embedding_scale(config),
            places=None if self._encoder is None else self._encoder.places(),
            inputs=self._mlps.token_inputs(),
            rotaries=tuple(rotaries.values()),
            layers=tuple(self._layers(tuple(rotaries))),
            norm=self._norm(family.base, family.final_norm) if self._encoder is None else self._encoder.final_norm(),
            head=head,
            logit_scale=family.logit_scale(config),
            logit_softcap=None if family.logit_softcap is None else getattr(config, family.logit_softcap),
        )

    def next_token(self, next_token: NextToken) -> tuple[DecoderLayout, Weight]:
        """The layer that drafts, with the model's head, and the model's table, which its layout has no numbers of."""
        config, family, share = self._config, self._family, self._share
        base, rotaries, shape = next_token.base(config), self._rotaries(), (config.vocab_size, config.hidden_size)
        index = max(index for index in range(config.num_hidden_layers) if self._keeps_kv(index))
        table = share.tensors.take(f"{family.base}{family.embedding}.weight", shape)
        head = self._own_head(table)
        layout = DecoderLayout(
            dtype=share.dtype,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            embedding=torch.empty(shape, dtype=share.dtype, device="meta"),
            rotaries=tuple(rotaries.values()),
            layers=(self._layer(index, tuple(rotaries), base + next_token.layer),),
            norm=self._norm(base, next_token.norm),
            head=Linear(weights=(share.numbers(table if head is None else head),)),
        )
        return layout, table

    def _own_head(self, table: Weight) -> Weight | None:
        """The head, if it is not the embedding table: also a stored head that differs from the table it is tied to."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        if not self._config.tie_word_embeddings:
            return self._share.tensors.take("lm_head.weight", shape)
        stored = self._share.tensors.find("lm_head.weight", shape) if self._share.tensors.may_repeat_head else None
        is_same = isinstance(stored, Tensor) and isinstance(table, Tensor) and torch.equal(stored, table)
        return None if is_same else stored

    def _embedding_scale(self) -> float:
        return self._share.rounded_scale(self._config.hidden_size**0.5) if self._family.scales_embedding else 1.0

    def _rotaries(self) -> Mapping[str, Rotary]:
        """Rotary angles by type of layer; under the empty name if there is one for all."""
        config = self._config
        if not any(self._family.rotates(config, index) for index in range(config.num_hidden_layers)):
            return {}
        by_type = {"": config.rope_parameters}
        if self._family.local_theta is not None:
            by_type = {kind: config.rope_parameters[kind] for kind in sorted(set(config.layer_types))}
        return {
            kind: make_rotary(
                rope,
                head_dim(config, config.layer_types.index(kind) if kind else 0),
                config.max_position_embeddings,
                interleaved=is_set(self._family.interleaved, config),
            )
            for kind, rope in by_type.items()
        }

    def _layers(self, rotaries: tuple[str, ...]) -> Iterator[Layer]:
        """Layers in order; for single half layers, a layer has one that mixes tokens and the MLP after it, if they
        exist.
        """
        if not self._family.has_single_halves:
            yield from (self._layer(index, rotaries) for index in range(self._config.num_hidden_layers))
            return
        mixer: int | None = None
        for index, kind in enumerate(self._config.layer_types):
            if self._family.keeps_kv(kind) or kind in self._family.state_lengths:
                if mixer is not None:
                    yield self._halves(mixer, None, rotaries)
                mixer = index
            else:
                yield self._halves(mixer, index, rotaries)
                mixer = None
        if mixer is not None:
            yield self._halves(mixer, None, rotaries)

    def _halves(self, mixer: int | None, feeding: int | None, rotaries: tuple[str, ...]) -> Layer:
        """One layer, of the tensors of one or two."""
        family = self._family
        of_mixer, of_mlp = (f"{family.base}{family.layers}{index}." for index in (mixer, feeding))
        state = None if mixer is None else self._state(mixer, of_mixer)
        attends = mixer is not None and state is None
        return Layer(
            attention_norm=None if mixer is None else self._optional_norm(of_mixer, family.attention_norm),
            attention=self._attention(mixer or 0, f"{of_mixer}{family.attention}.", rotaries) if attends else None,
            state=state,
            mlp_norm=None if feeding is None else self._optional_norm(of_mlp, family.attention_norm),
            mlp=None if feeding is None else self._mlps.build(feeding, of_mlp),
        )

    def _keeps_kv(self, index: int) -> bool:
        types = getattr(self._config, "layer_types", None)
        return types is None or self._family.keeps_kv(types[index])

    def _layer(self, index: int, rotaries: tuple[str, ...], prefix: str = "") -> Layer:
        """`prefix`: of the names of the tensors, if they are not those of the model's layer."""
        family, prefix = self._family, prefix or f"{self._family.base}{self._family.layers}{index}."
        parallel = is_set(family.parallel, self._config)
        state = self._state(index, prefix)
        attends = self._keeps_kv(index)
        attention = self._attention(index, f"{prefix}{family.attention}.", rotaries) if attends else None
        if isinstance(attention, Attention) and isinstance(state, Mamba2):
            attention, state = slices_beside(attention, state, self._share.dtype)
        return Layer(
            attention_norm=self._attention_norm(index, prefix),
            attention=attention,
            state=state,
            attention_out_norm=self._optional_norm(prefix, family.attention_out_norm),
            mlp_norm=None if parallel and family.shared_norm else self._mlp_norm(index, prefix),
            mlp=self._mlps.build(index, prefix),
            beside=self._mlps.beside(prefix),
            mlp_out_norm=self._optional_norm(prefix, family.mlp_out_norm),
            residual_scale=family.residual_scale(self._config),
            input=self._mlps.input(prefix),
            output_scale=self._output_scale(prefix),
            parallel=parallel,
        )

    def _state(self, index: int, prefix: str) -> ShortConv | GatedDeltaNet | Mamba2 | None:
        """State of a layer in place of attention, or beside it."""
        if self._family.conv is not None and self._config.layer_types[index] == "conv":
            return self._short_conv(f"{prefix}{self._family.conv}.")
        if self._delta_nets is not None and self._config.layer_types[index] == LINEAR:
            apart = self._family.delta_net is DeltaPacking.APART
            return self._delta_nets.build(f"{prefix}{self._family.attention if apart else 'linear_attn'}.")
        if self._mambas is not None and self._config.layer_types[index] in self._family.state_lengths:
            return self._mambas.build(prefix)
        return None

    def _delta_net_builder(self) -> DeltaNetBuilder | KimiDeltaBuilder | None:
        packing = self._family.delta_net
        if packing is DeltaPacking.APART:
            return KimiDeltaBuilder(self._share)
        return None if packing is None else DeltaNetBuilder(self._share, packing)

    def _attention(self, index: int, prefix: str, rotaries: tuple[str, ...]) -> Attention | LatentAttention:
        if self._family.latent:
            return latent_attention(self._share, prefix, self._rotary_index(index, rotaries))
        family, config, share = self._family, self._config, self._share
        size, kv_heads = head_dim(config, index), num_kv_heads(config, index)
        qkv = self._qkv(index, prefix)
        slices = share.slices(config.num_attention_heads)
        shape = config.hidden_size, config.num_attention_heads * size
        output = share.rows(prefix + family.output, shape, slices, has_bias=is_set(family.output_bias, config))
        source = family.kv_source(config, index)
        first_key, num_keys = share.part(kv_heads * size, kv_heads)
        return Attention(
            num_heads=output.in_features // size,
            num_kv_heads=num_keys // size,
            first_kv_head=first_key // size,
            head_dim=size,
            qkv=qkv,
            kv_source=source,
            has_gate=family.has_output_gate,
            query_norm=self._head_norm(prefix + family.query_norm, config.num_attention_heads, size),
            key_norm=None if source is not None else self._head_norm(prefix + family.key_norm, kv_heads, size),
            norms_after_rotation=family.norms_after_rotation,
            value_norm=self._value_norm(size) if family.norms_values and source is None else None,
            query_scale=family.query_scale(config),
            value_scale=family.value_scale(config),
            rotary=self._rotary_index(index, rotaries),
            scaling=family.scaling(config),
            sliding_window=self._family.window_of(self._config, index),
            sees_behind=family.encoder is not None,
            softcap=None if family.softcap is None else getattr(config, family.softcap),
            sinks=self._sinks(prefix) if family.sinks else None,
            output=output,
            num_slices=slices,
        )

    def _short_conv(self, prefix: str) -> ShortConv:
        config, share, hidden = self._config, self._share, self._config.hidden_size
        has_bias, slices, part = config.conv_bias, share.slices(hidden), share.part(hidden)
        kernel = share.tensors.take(f"{prefix}conv.weight", (hidden, 1, config.conv_L_cache)).narrow(0, *part)
        bias = share.tensors.take(f"{prefix}conv.bias", (hidden,)).narrow(0, *part) if has_bias else None
        return ShortConv(
            num_channels=part[1],
            inputs=share.columns([f"{prefix}in_proj"], [(hidden, None)] * 3, hidden, has_bias=has_bias),
            kernel=share.floats(kernel).squeeze(1),
            bias=None if bias is None else share.floats(bias),
            output=share.rows(f"{prefix}out_proj", (hidden, hidden), slices, has_bias=has_bias),
            num_slices=slices,
        )

    def _value_norm(self, size: int) -> Norm:
        return Norm(kind="rms", weight=torch.ones(size), eps=float(getattr(self._config, self._family.eps)))

    def _output_scale(self, prefix: str) -> float:
        name = self._family.output_scale
        return 1.0 if name is None else float(self._share.floats(self._share.tensors.take(prefix + name, (1,))))

    def _qkv(self, index: int, prefix: str) -> Linear:
        family, config = self._family, self._config
        size, kv_heads = head_dim(config, index), num_kv_heads(config, index)
        queries, keys = config.num_attention_heads * size, kv_heads * size
        outputs = [((1 + family.has_output_gate) * queries, None), *[(keys, kv_heads)] * 2]
        if family.kv_source(config, index) is not None:
            names, has_bias = [prefix + family.qkv[0]], is_set(family.qkv_bias, config)
            return self._share.columns(names, outputs[:1], config.hidden_size, has_bias=has_bias)
        if family.values_are_keys(config, index):
            names, has_bias = [prefix + name for name in family.qkv[:2]], is_set(family.qkv_bias, config)
            keys_twice = self._share.columns(names, outputs[:2], config.hidden_size, has_bias=has_bias, together=size)
            return _values_from_keys(keys_twice)
        if family.packing is Packing.HEAD_BY_HEAD:
            outputs = [(3 * queries, None)]
        qkv = self._share.columns(
            [prefix + name for name in family.qkv],
            outputs,
            config.hidden_size,
            has_bias=is_set(family.qkv_bias, config),
            may_stay=self._share.keeps_units or not (family.packing is Packing.HEAD_BY_HEAD or family.has_output_gate),
            together=size,
        )
        if family.has_output_gate:
            return _gates_apart(qkv, size)
        return _by_kind(qkv, size) if family.packing is Packing.HEAD_BY_HEAD else qkv

    def _head_norm(self, name: str, num_heads: int, head_dim: int) -> Norm | None:
        family = self._family
        if family.head_norms is None or not is_set(family.has_head_norms, self._config):
            return None
        if family.head_norms is HeadNorms.ONE_FOR_EACH:
            return self._share.norm(name, (head_dim,), has_bias=family.head_norm_bias)
        if self._share.size > 1:
            raise NotStated("ranks would have to gather its queries and keys, which are normed over all heads")
        if family.head_norms is HeadNorms.OWN_APART:
            return _stacked(
                [self._share.norm(f"{name}.norms.{i}", (head_dim,), has_bias=False) for i in range(num_heads)]
            )
        shape = (num_heads, head_dim) if family.head_norms is HeadNorms.OWN else (num_heads * head_dim,)
        return self._share.norm(name, shape, has_bias=False)

    def _rotary_index(self, index: int, rotaries: tuple[str, ...]) -> int | None:
        if not self._family.rotates(self._config, index):
            return None
        return 0 if rotaries == ("",) else rotaries.index(self._config.layer_types[index])

    def _sinks(self, prefix: str) -> Tensor:
        num_heads = self._config.num_attention_heads
        whole = self._share.tensors.take(f"{prefix}sinks", (num_heads,))
        return self._share.floats(whole.narrow(0, *self._share.part(num_heads)))

    def _attention_norm(self, index: int, prefix: str) -> Norm | None:
        if self._encoder is not None:
            return self._encoder.attention_norm(index)
        return self._optional_norm(prefix, self._family.attention_norm)

    def _mlp_norm(self, index: int, prefix: str) -> Norm | None:
        if self._encoder is not None:
            return self._encoder.mlp_norm(index)
        return self._optional_norm(prefix, self._family.mlp_norm)

    def _optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else self._norm(prefix, name)

    def _norm(self, prefix: str, name: str) -> Norm:
        return self._share.norm(
            prefix + name, (self._config.hidden_size,), has_bias=is_set(self._family.norm_bias, self._config)
        )


def _values_from_keys(linear: Linear) -> Linear:
    """Queries and keys, and the keys again as values."""
    bias = linear.bias
    if bias is not None:
        bias = torch.cat((bias, bias[-int(linear.parts[-1].shape[0]) :]))
    weights, units, codes = ((*parts, *parts[-1:]) for parts in (linear.weights, linear.units, linear.codes))
    return Linear(weights=weights, units=units, codes=codes, bias=bias)


def _by_kind(linear: Linear, head_dim: int) -> Linear:
    """Views in a layout's order, of outputs that are query, key and value of one head after the other."""
    return _in_turns(linear, head_dim, 3, int(linear.parts[0].shape[0]))


def _gates_apart(qkv: Linear, head_dim: int) -> Linear:
    """Views of queries that have each head's gate behind it: all queries, then all gates."""
    return _in_turns(qkv, head_dim, 2, int(qkv.parts[0].shape[0]))


def _in_turns(linear: Linear, head_dim: int, kinds: int, length: int) -> Linear:
    """Views of a linear whose first part, of this many outputs, has heads of several kinds by turns: kind by kind."""
    order = [head * head_dim for kind in range(kinds) for head in range(kind, length // head_dim, kinds)]

    def views(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*(parts[0].narrow(0, start, head_dim) for start in order), *parts[1:]) if parts else ()

    bias = linear.bias
    if bias is not None:
        bias = torch.cat([*(bias.narrow(0, start, head_dim) for start in order), bias[length:]])
    return Linear(weights=views(linear.weights), units=views(linear.units), codes=views(linear.codes), bias=bias)


def _stacked(norms: list[Norm]) -> Norm:
    return Norm(kind=norms[0].kind, weight=torch.stack([norm.weight for norm in norms]), eps=norms[0].eps)
