"""Adapters of experts as PEFT writes them for transformers' modules with the weights of all experts
(`target_parameters`), as matrices of each expert.

Of a weight with E experts A is [E * rank, inputs], the ranks of one expert after those of another, and B [outputs,
rank * E], the experts of one rank after those of another: `ParamWrapper` of `peft/tuners/lora/layer.py`. Its versions
before 0.19.1 take inputs for outputs in most models: then the product of both is the transposed addition.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.worker.executors.adapters import LowRank, StoredMatrix
from holdfast.worker.models.adapter_folder import AdapterFolder
from holdfast.worker.models.adapter_form import Pair
from holdfast.worker.models.adapter_names import layer_of
from holdfast.worker.models.module_places import GATE_UP, Place, is_of_expert

_DOWN: Final = "down_proj"
_UP: Final = "up_proj"
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_TURNED_UNTIL: Final = (0, 19, 0)
"""The last version of PEFT that took inputs for outputs."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A weight of all experts."""

    name: str
    modules: tuple[str, ...]
    """Names for each expert."""
    shape: tuple[int, int]
    """Outputs and inputs of an expert."""


Mixtures = Mapping[str, Mapping[str, _Parameter]]
"""Weights of experts, by layer and name."""


def mixtures_of(places: Mapping[str, Place | None]) -> Mixtures:
    """The mixtures of a layout."""
    experts: dict[tuple[str, str], list[str]] = {}
    shapes: dict[tuple[str, str], tuple[int, int]] = {}
    for key, place in places.items():
        if place is None or not is_of_expert(key):
            continue
        is_down = ".expert_down." in key
        name = _DOWN if is_down else _UP if place.together is None else GATE_UP
        module = place.modules[0] if place.together is None else place.together.module
        of = layer_of(module), name
        experts.setdefault(of, []).append(module)
        shapes[of] = place.shapes[0] if place.together is None else place.together.shape
    found: dict[str, dict[str, _Parameter]] = {}
    for (layer, name), modules in experts.items():
        found.setdefault(layer, {})[name] = _Parameter(name, tuple(modules), shapes[layer, name])
    return found


def of_experts(folder: AdapterFolder, layers: Mapping[str, str], mixtures: Mixtures) -> dict[str, LowRank]:
    """Matrices of each expert by module. `layers`: the model's names of the layers of the adapter's modules.

    Raises `ConfigurationError` where an adapter of experts is not of this model's.
    """
    found: dict[str, LowRank] = {}
    for owner, pairs in folder.form.stacks.items():
        mixture = mixtures.get(layers.get(layer_of(owner), ""))
        if mixture is None:
            raise folder.refused(f"{owner} has tensors of experts, and the model has none there that take an adapter")
        named = [one for one in mixture.values() if folder.form.names_parameter(f"{owner}.{one.name}")]
        is_turned = _are_turned(folder, owner, pairs, named)
        for parameter, pair in zip(named, _in_order(pairs, named, is_turned) or (), strict=True):
            found |= _each(folder, owner, pair, parameter, is_turned)
    return found


def _in_order(pairs: Sequence[Pair], named: Sequence[_Parameter], is_turned: bool) -> list[Pair] | None:
    """The pair of each parameter; None: they are of others. Where shapes are the same, PEFT has them in order."""
    left, found = list(pairs), []
    for parameter in named:
        shape = parameter.shape[::-1] if is_turned else parameter.shape
        taken = next((pair for pair in left if (pair.b.shape[0], pair.a.shape[1]) == shape), None)
        if taken is None:
            return None
        left.remove(taken)
        found.append(taken)
    return None if left else found


def _are_turned(folder: AdapterFolder, owner: str, pairs: Sequence[Pair], named: Sequence[_Parameter]) -> bool:
    """Whether the products of pairs are transposed additions, by their shapes, or by PEFT's version."""
    fit = [turned for turned in (False, True) if _in_order(pairs, named, turned) is not None]
    if not fit:
        has = " and ".join(f"lora_A {pair.a.shape} with lora_B {pair.b.shape}" for pair in pairs)
        wanted = " and ".join(f"{one.name} with {one.shape[1]} inputs and {one.shape[0]} outputs" for one in named)
        raise folder.refused(
            f"{owner} has {has}, and target_parameters name, of each expert, {wanted or 'none of its weights'}: "
            "tensors are missing, or it is an adapter of another model"
        )
    if len(fit) == 1:
        return fit[0]
    version = _VERSION.match(str(folder.form.config.get("peft_version")))
    if version is None:
        raise folder.refused(
            f"{owner} has tensors whose inputs may be outputs, and there is no peft_version; load and save the adapter "
            "with PEFT 0.19.1 or later"
        )
    return tuple(map(int, version.groups())) <= _TURNED_UNTIL


def _each(folder: AdapterFolder, owner: str, pair: Pair, parameter: _Parameter, is_turned: bool) -> dict[str, LowRank]:
    """Matrices of each expert, which lie in those of all."""
    rank, scale = folder.form.rank_and_scale(folder.given, f"{owner}.{parameter.name}")
    (all_ranks, width), (height, _), count = pair.a.shape, pair.b.shape, len(parameter.modules)
    if all_ranks != rank * count or pair.b.shape[1] != all_ranks:
        raise folder.refused(
            f"{owner} has lora_A {pair.a.shape} and lora_B {pair.b.shape}, and must have {rank} ranks for each of "
            f"{count} experts of {parameter.name}"
        )
    found = {}
    for number, module in enumerate(parameter.modules):
        of_a = pair.a.first + number * rank * width * pair.a.dtype.itemsize
        of_b = pair.b.first + number * pair.b.dtype.itemsize
        a = StoredMatrix(pair.a.dtype, (rank, width), of_a)
        b = StoredMatrix(pair.b.dtype, (height, rank), of_b, (all_ranks, count))
        found[module] = LowRank(a=b.turned, b=a.turned, scale=scale) if is_turned else LowRank(a=a, b=b, scale=scale)
    return found
