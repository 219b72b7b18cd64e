"""C structures of the native executor: a mirror of `native/decoder.h` and `native/sampler.h`, field by field."""

from ctypes import POINTER, Structure, c_double, c_float, c_int, c_long, c_void_p
from typing import Any, Final

from holdfast.worker.draws import DRAW_TYPES, PENALTIES

KEPT_AS_INT8: Final = 1  # value of `kept_as`: keys and values are codes; 0: numbers of the model's dtype


class NativeUnits(Structure):
    """Layout of a quantized weight's units: bits per code, kind of offset, dtype of scales."""

    _fields_ = (("bits", c_int), ("offset", c_int), ("scales", c_int), ("before", c_int))


class NativePanel(Structure):
    """Address and layout of one panel of quantized units."""

    _fields_ = (("first", c_void_p), ("units", NativeUnits))


class NativeLinear(Structure):
    """A linear layer's packed weight: tiles or panels, a bias, and slices of its inputs."""

    _fields_ = (
        ("tiles", c_void_p),
        ("bias", c_void_p),
        ("slices", c_int),
        ("slice_tiles", c_int),
        ("groups", c_int),
        ("outputs", c_int),
        ("panel_bytes", c_long),
        ("units", NativeUnits),
        ("panels", POINTER(NativePanel)),
        ("code_run", c_int),
        ("site", c_int),
    )


class NativeSpan(Structure):
    """Ranks of a LoRA adapter that 16 outputs of a linear have weights of, and where they lie in `b`."""

    _fields_ = (("first", c_int), ("end", c_int), ("place", c_long))


class NativeAdapted(Structure):
    """One linear's LoRA matrices A and B, and a scale for each rank."""

    _fields_ = (("a", c_void_p), ("b", c_void_p), ("scales", c_void_p), ("spans", c_void_p), ("ranks", c_int))


class NativeAdapter(Structure):
    """A LoRA adapter: one `NativeAdapted` for each linear that adapters may change."""

    _fields_ = (("linears", c_void_p),)


class NativeNorm(Structure):
    """RMSNorm or LayerNorm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("is_layer_norm", c_int))


class NativeMlp(Structure):
    """An MLP, with or without a gate."""

    _fields_ = (
        ("up", NativeLinear),
        ("down", NativeLinear),
        ("gate_scale", c_float),
        ("inner_scale", c_float),
        ("activation", c_int),
        ("has_gate", c_int),
    )


class NativeExperts(Structure):
    """A mixture of experts: router, experts, shared experts and the rule that chooses."""

    _fields_ = (
        ("router", NativeLinear),
        ("experts", POINTER(NativeMlp)),
        ("shared", POINTER(NativeMlp)),
        *((name, POINTER(NativeLinear)) for name in ("shared_gate", "latent")),
        ("selection_bias", c_void_p),
        ("scales", c_void_p),
        ("least_sum", c_float),
        ("num_experts", c_int),
        ("top_k", c_int),
        ("scoring", c_int),
        ("normalized", c_int),
        ("num_groups", c_int),
        ("top_groups", c_int),
        ("group_best", c_int),
    )


class NativeBeside(Structure):
    """Norms of a layer that adds a mixture of experts to an MLP."""

    _fields_ = (
        ("norm", NativeNorm),
        ("router_norm", NativeNorm),
        ("out_norm", NativeNorm),
        ("mlp_out_norm", NativeNorm),
    )


class NativeRotary(Structure):
    """A rotary embedding: inverse frequencies and the table of cosines and sines filled so far."""

    _fields_ = (
        ("inverse_frequencies", c_void_p),
        ("table", c_void_p),
        ("scaling", c_float),
        ("pairs", c_int),
        ("interleaved", c_int),
        ("filled", c_int),
    )


class NativeShortConv(Structure):
    """A short convolution in place of attention (LFM2)."""

    _fields_ = (
        ("inputs", NativeLinear),
        ("kernel", c_void_p),
        ("bias", c_void_p),
        ("channels", c_int),
        ("width", c_int),
        ("columns", c_int),
    )


class NativeRecurrence(Structure):
    """A recurrence in place of attention or beside it: Gated DeltaNet or Mamba2."""

    _fields_ = (
        ("inputs", NativeLinear),
        ("gates", NativeLinear),
        ("kernel", c_void_p),
        ("conv_bias", c_void_p),
        ("a_log", c_void_p),
        ("dt_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", NativeNorm),
        ("dt_scale", c_float),
        ("z_scale", c_float),
        ("least_dt", c_float),
        ("most_dt", c_float),
        ("key_heads", c_int),
        ("value_heads", c_int),
        ("key_dim", c_int),
        ("value_dim", c_int),
        ("width", c_int),
        ("columns", c_int),
        ("unit_heads", c_int),
        ("heads_per_slice", c_int),
        ("norm_heads", c_int),
        ("norm_groups", c_int),
        ("first_group", c_int),
        ("gate_inputs", c_int),
    )


class NativeLatent(Structure):
    """Multi-head latent attention (DeepSeek), apart from `qkv` and `output`."""

    _fields_ = (
        ("queries", NativeLinear),
        ("absorb", NativeLinear),
        ("expand", NativeLinear),
        ("query_norm", NativeNorm),
        ("latent_norm", NativeNorm),
        ("query_outputs", c_int),
        ("plain_dim", c_int),
        ("rope_dim", c_int),
        ("latent_dim", c_int),
        ("value_dim", c_int),
    )


class NativeLayerInput(Structure):
    """A layer's gate and projection of its per-layer input of a token (Gemma 3n's per-layer embeddings)."""

    _fields_ = (("gate", NativeLinear), ("projection", NativeLinear), ("norm", NativeNorm), ("activation", c_int))


class NativeTokenInputs(Structure):
    """Table and projection that the layers' own inputs are computed from."""

    _fields_ = (
        ("table", c_void_p),
        ("context", NativeLinear),
        ("norm", NativeNorm),
        ("table_scale", c_float),
        ("context_scale", c_float),
        ("scale", c_float),
        ("dim", c_int),
    )


class NativeLayer(Structure):
    """One layer: norms, attention or state, MLP or experts, and the addresses of its cache."""

    _fields_ = (
        ("attention_norm", NativeNorm),
        ("attention_out_norm", NativeNorm),
        ("mlp_norm", NativeNorm),
        ("mlp_out_norm", NativeNorm),
        ("query_norm", NativeNorm),
        ("key_norm", NativeNorm),
        ("value_norm", NativeNorm),
        ("qkv", NativeLinear),
        ("output", NativeLinear),
        ("mlp", NativeMlp),
        ("experts", POINTER(NativeExperts)),
        ("beside", POINTER(NativeBeside)),
        ("sinks", c_void_p),
        ("query_scales", c_void_p),
        ("pages", c_void_p),
        ("conv", POINTER(NativeShortConv)),
        ("recurrence", POINTER(NativeRecurrence)),
        ("latent", POINTER(NativeLatent)),
        ("input", POINTER(NativeLayerInput)),
        ("states", c_void_p),
        ("state_length", c_long),
        ("block_bytes", c_long),
        ("scaling", c_float),
        ("softcap", c_float),
        ("value_scale", c_float),
        ("residual_scale", c_float),
        ("output_scale", c_float),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("head_dim", c_int),
        ("heads_per_slice", c_int),
        ("window", c_int),
        ("rotary", c_int),
        ("head_norms", c_int),
        ("norms_after_rotation", c_int),
        ("has_gate", c_int),
        ("parallel", c_int),
        ("block_size", c_int),
        ("has_own_table", c_int),
        ("reads_others", c_int),
    )


class NativeAttention(Structure):
    """Attention over the paged cache for Hugging Face's modules, which compute queries, keys and values themselves."""

    _fields_ = (
        ("pages", c_void_p),
        ("softcap", c_float),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("key_dim", c_int),
        ("value_dim", c_int),
        ("window", c_int),
        ("kept_as", c_int),
    )


class NativeAttentionRows(Structure):
    """Queries, keys, values and output of one step of `NativeAttention`: [token][head][dimension]."""

    _fields_ = (
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("query_token_stride", c_long),
        ("query_head_stride", c_long),
        ("key_token_stride", c_long),
        ("key_head_stride", c_long),
        ("value_token_stride", c_long),
        ("value_head_stride", c_long),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("scaling", c_float),
    )


class NativeExchange(Structure):
    """Memory that all ranks of a replica share, and the processes that map it."""

    _fields_ = (
        ("memory", c_void_p),
        ("processes", POINTER(c_int)),
        ("timeout_s", c_float),
        ("rank", c_int),
        ("ranks", c_int),
    )


class NativeModel(Structure):
    """This rank's share of a model: layers, embedding rows, head, and constants."""

    _fields_ = (
        ("layers", POINTER(NativeLayer)),
        ("rotaries", POINTER(NativeRotary)),
        ("embedding", c_void_p),
        ("norm", NativeNorm),
        ("head", NativeLinear),
        ("inputs", POINTER(NativeTokenInputs)),
        ("exchange", POINTER(NativeExchange)),
        ("embedding_scale", c_float),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("num_layers", c_int),
        ("num_rotaries", c_int),
        ("hidden", c_int),
        ("first_vocab_row", c_int),
        ("vocab_rows", c_int),
        ("vocab_size", c_int),
        ("max_rows", c_int),
        ("tensor_parallel_size", c_int),
        ("kept_as", c_int),
        ("sum_parts", c_int),
        ("num_sites", c_int),
    )


class NativeStep(Structure):
    """Inputs and outputs of one step: a batch of sequences with their tokens, block tables and wanted logits."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("first_positions", c_void_p),
        ("num_tokens", c_void_p),
        ("num_blocks", c_void_p),
        ("blocks", c_void_p),
        ("wanted", c_void_p),
        ("num_window_blocks", c_void_p),
        ("window_blocks", c_void_p),
        ("state_slots", c_void_p),
        ("num_drafts", c_void_p),
        ("logits", c_void_p),
        ("block_best", c_void_p),
        ("block_mass", c_void_p),
        ("all_logits", c_void_p),
        ("hidden", c_void_p),
        ("best", c_void_p),
        ("progress", c_void_p),
        ("adapter_of", c_void_p),
        ("adapters", c_void_p),
        ("pooled", c_void_p),
        ("num_rows", c_int),
        ("num_sequences", c_int),
        ("num_wanted", c_int),
        ("first_layer", c_int),
        ("num_adapters", c_int),
        ("num_pooled", c_int),
    )


class NativeEdits(Structure):
    """Edits of one row of logits before the draw: mask, bans, biases, penalties."""

    _fields_ = (
        ("mask", c_void_p),
        ("allowed", c_void_p),
        ("banned", c_void_p),
        ("biased", c_void_p),
        ("biases", c_void_p),
        ("outputs", c_void_p),
        ("prompt", c_void_p),
        ("mask_bits", c_long),
        ("num_allowed", c_long),
        ("num_banned", c_long),
        ("num_biased", c_long),
        ("num_outputs", c_long),
        ("num_prompt", c_long),
        ("penalize", c_int),
        ("penalties", c_float * len(PENALTIES)),
    )


_TYPES: dict[str, Any] = {"q": c_long, "d": c_double, "f": c_float, "i": c_int}


class NativeDraw(Structure):
    """Sampling parameters of one draw, in the order of `DRAW_TYPES`."""

    _fields_ = tuple((name, _TYPES[letter]) for name, letter in DRAW_TYPES.items())


class NativeDrawn(Structure):
    """Result of one draw: token id, its rank and log-probability, and the number of top log-probabilities."""

    _fields_ = (("token", c_int), ("rank", c_int), ("logprob", c_float), ("num_top", c_int))


_OF_MODEL = (
    *(NativeUnits, NativePanel, NativeLinear, NativeNorm, NativeMlp, NativeExperts, NativeRotary, NativeShortConv),
    *(NativeRecurrence, NativeLatent, NativeLayerInput, NativeTokenInputs, NativeLayer, NativeExchange, NativeModel),
)
_OF_STEPS = (NativeStep, NativeEdits, NativeDraw, NativeDrawn, NativeAttention, NativeAttentionRows, NativeSpan)
SIZES = {kind.__name__: kind for kind in (*_OF_MODEL, *_OF_STEPS, NativeAdapted, NativeAdapter)}
"""Sizes that must equal the library's own: a field that is missing here would shift all others."""
