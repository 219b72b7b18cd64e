"""C structures of a model: its layers and their parts, a mirror of `native/decoder.h`, field by field."""

from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p

from holdfast.worker.executors.cpu.linear_structures import NativeLinear, NativeNorm


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
        ("rates", NativeLinear),
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
        ("coded", NativeLinear),
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
        ("sees_behind", c_int),
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
        ("positions", c_void_p),
        ("segments", c_void_p),
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
        ("embedding_site", c_int),
    )
