"""Changes of stored tensors, by which llama.cpp's converter is undone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from holdfast.worker.models.formats.gguf_block_names import Turn
from holdfast.worker.models.formats.gguf_metadata import NamedTensor, of_pairs

Change = Callable[[NamedTensor, Mapping[str, Any]], list[NamedTensor]]
"""Rule by which a stored tensor becomes parameters; it is given the model's config."""


def same(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    return [tensor]


def vector(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    return [_shaped(tensor, prod(tensor.stored.shape))]


def row(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    """A matrix of one row, which may be stored as a vector."""
    return [_shaped(tensor, 1, tensor.stored.shape[-1])]


def _shaped(tensor: NamedTensor, *shape: int) -> NamedTensor:
    return replace(tensor, stored=replace(tensor.stored, shape=shape))


def decays(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    return [replace(one, form="decays") for one in vector(tensor, config)]


def convolution(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    return [replace(tensor, form="convolution")]


def paired(heads: str) -> Change:
    """Queries or keys as llama.cpp rotates them. `heads`: entry of the config."""

    def change(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
        return [replace(tensor, rows=of_pairs(tensor.stored.shape[0], config[heads]))]

    return change


def parts_of_heads(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    """Queries, keys and values of the first head, then of the next, which llama.cpp has one kind after the other."""
    heads = config["num_attention_heads"]
    order = Turn(0, 1, heads, 3, tensor.stored.shape[0] // heads // 3)
    return [replace(tensor, rows=order)]


def queries_keys_values(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    """One linear's rows as those of three."""
    keys = config["num_key_value_heads"] * config["head_dim"]
    queries, found, first = config["num_attention_heads"] * config["head_dim"], [], 0
    for name, count in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        found.append(replace(tensor, name=tensor.name.replace("qkv_proj", name), first=first, count=count))
        first += count
    return found


def absorbed(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    """Weights [heads, out, in] of the absorbed form."""
    heads, rows, columns = tensor.stored.shape
    return [replace(_shaped(tensor, heads * rows, columns), form="absorbed")]


def value_heads(sizes: Callable[[Mapping[str, Any]], tuple[int, int]], then: Change = same) -> Change:
    """Value heads of Gated DeltaNet: llama.cpp has the first of each key head, then the second ones. `sizes`: the row
    at which they begin, and the rows of one.
    """

    def change(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
        start, inner = sizes(config)
        return [replace(one, rows=_by_key_head(config, start, inner)) for one in then(tensor, config)]

    return change


def _by_key_head(config: Mapping[str, Any], start: int, inner: int) -> Turn:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return Turn(start, 1, keys, values // keys, inner)


def columns_of_value_heads(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    return [replace(tensor, columns=_by_key_head(config, 0, config["linear_value_head_dim"]))]


def rates_and_times(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    """Rates (b) and time steps (a), which lie by key head: first the rates of its value heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = Turn(0, 1, 2, keys, values // keys)
    names = (tensor.name.replace("in_proj_ba", f"in_proj_{one}") for one in "ba")
    return [
        replace(tensor, name=name, rows=order, first=which * values, count=values) for which, name in enumerate(names)
    ]


def behind_keys(config: Mapping[str, Any]) -> tuple[int, int]:
    """First row behind queries and keys in Gated DeltaNet's stacked projection, and rows of one value head."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return 2 * keys, config["linear_value_head_dim"]
