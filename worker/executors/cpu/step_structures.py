"""C structures of a step: batch, attention and draws, a mirror of `native/decoder.h` and `native/sampler.h`, field by
field.
"""

from ctypes import Structure, c_double, c_float, c_int, c_long, c_void_p
from typing import Any

from holdfast.worker.draws import DRAW_TYPES, PENALTIES


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
        ("second_starts", c_void_p),
        ("num_rows", c_int),
        ("num_sequences", c_int),
        ("num_wanted", c_int),
        ("first_layer", c_int),
        ("num_adapters", c_int),
        ("num_pooled", c_int),
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
