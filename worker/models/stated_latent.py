"""Multi-head latent attention of stated families, as parts of a decoder layout."""

from typing import Final

import torch

from holdfast.worker.executors.layout import LatentAttention
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.models.family import is_set
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.stated_config import NotStated

_EPS: Final = 1e-6
"""Epsilon of both norms, whatever config.json says: written into the code of transformers."""


def latent_attention(share: RankShare, prefix: str, rotary: int | None) -> LatentAttention:
    """Latent attention of the layer whose tensors have names with this prefix, and with these rotary angles of the
    layout. Ranks share the query heads; each has the whole latent.

    Raises `NotStated` for a config that no layout can express.
    """
    config, family = share.config, share.family
    rank, latent, rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    plain, value, heads = config.qk_nope_head_dim, config.v_head_dim, config.num_attention_heads
    has_bias = is_set(family.qkv_bias, config)
    if heads != config.num_key_value_heads:
        raise NotStated(f"it has {heads} query heads and {config.num_key_value_heads} KV heads, of latent attention")
    if rank is None and has_bias:
        raise NotStated("its latents have biases, and its queries have none")
    slices = share.slices(heads)
    kept = f"{prefix}kv_a_proj_with_mqa"
    if rank is None:
        names, outputs = [f"{prefix}q_proj", kept], [(heads * (plain + rope), None), (latent + rope, 1)]
    else:
        names, outputs = [f"{prefix}q_a_proj", kept], [(rank, 1), (latent + rope, 1)]
    together = plain + rope if rank is None else rank
    inputs = share.columns(names, outputs, config.hidden_size, has_bias=has_bias, together=together)
    queries = None
    if rank is not None:
        queries = share.columns([f"{prefix}q_b_proj"], [(heads * (plain + rope), None)], rank, has_bias=False)
    absorb, expand = _of_heads(share, f"{prefix}kv_b_proj.weight", heads, (plain, value), latent)
    return LatentAttention(
        num_heads=len(absorb.weights),
        plain_dim=plain,
        rope_dim=rope,
        latent_dim=latent,
        value_dim=value,
        inputs=inputs,
        query_norm=None if rank is None else _norm(share, f"{prefix}q_a_layernorm.weight", rank),
        queries=queries,
        latent_norm=_norm(share, f"{prefix}kv_a_layernorm.weight", latent),
        absorb=absorb,
        expand=expand,
        rotary=rotary,
        scaling=family.scaling(config),
        output=share.rows(
            prefix + family.output,
            (config.hidden_size, heads * value),
            slices,
            has_bias=is_set(family.output_bias, config),
        ),
        num_slices=slices,
    )


def _norm(share: RankShare, name: str, size: int) -> Norm:
    return Norm(kind="rms", weight=share.floats(share.tensors.take(name, (size,))), eps=_EPS)


def _of_heads(share: RankShare, name: str, heads: int, sizes: tuple[int, int], latent: int) -> tuple[Linear, Linear]:
    """Weights that take queries of each of this rank's heads to the latent, and from it to values: views of one weight,
    that makes keys and values [plain, value] of the first head, then of the next.
    """
    outputs = heads * sum(sizes)
    whole = share.numbers(share.tensors.take(name, (outputs, latent)).narrow(0, *share.part(outputs)))
    pieces = torch.split(whole, [*sizes] * (len(whole) // sum(sizes)))
    keys, values = pieces[0::2], pieces[1::2]
    return Linear(weights=tuple(one.T for one in keys)), Linear(weights=tuple(values))
