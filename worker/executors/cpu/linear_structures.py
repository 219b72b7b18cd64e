"""C structures of linear layers, norms and LoRA adapters: a mirror of `native/decoder.h`, field by field."""

from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p


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


class NativeNorm(Structure):
    """RMSNorm or LayerNorm."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("is_layer_norm", c_int),
        ("stays", c_int),
    )


class NativeSpan(Structure):
    """Ranks of a LoRA adapter that 16 outputs of a linear have weights of, and where they lie in `b`."""

    _fields_ = (("first", c_int), ("end", c_int), ("place", c_long))


class NativeAdapted(Structure):
    """One linear's LoRA matrices A and B, and a scale for each rank; or those of each expert of a mixture."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "scales", "spans")),
        ("ranks", c_int),
        ("experts", c_void_p),
    )


class NativeAdapter(Structure):
    """A LoRA adapter: one `NativeAdapted` for each linear that adapters may change."""

    _fields_ = (("linears", c_void_p),)


class NativeLowRank(Structure):
    """LoRA matrices of one module as its file has them, with a scale; rank 0: the module has none."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        *((name, c_long) for name in ("a_stride", "a_step", "b_stride", "b_step")),
        ("scale", c_float),
        ("rank", c_int),
        ("a_dtype", c_int),
        ("b_dtype", c_int),
    )


class NativeAdaptedSite(Structure):
    """Matrices that a LoRA adapter is packed from for one linear, and fixed inputs by which it is proved."""

    _fields_ = (
        ("parts", c_void_p),
        ("slice_length", c_long),
        ("filled_length", c_long),
        ("part_of", c_void_p),
        ("rows", c_void_p),
        ("columns", c_void_p),
        ("probe", c_void_p),
        ("filled_probe", c_void_p),
        ("output_parts", c_void_p),
        ("output_rows", c_void_p),
        ("output_places", c_void_p),
        ("outputs", c_long),
        ("num_parts", c_int),
        ("slices", c_int),
        ("blocks", c_int),
        ("number", c_int),
    )
