"""Adapters of experts as PEFT writes them for transformers' modules with the weights of all experts
(`target_parameters`), as matrices of each expert.

Of a weight with E experts A is [E * rank, inputs], the ranks of one expert after those of another, and B [outputs,
rank * E], the experts of one rank after those of another: `ParamWrapper` of `peft/tuners/lora/layer.py`. Its versions
before 0.19.1 take inputs for outputs in most models: then the product of both is the transposed addition.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.worker.executors.adapters import LowRank, StoredMatrix
from holdfast.worker.models.adapter_folder import AdapterFolder
from holdfast.worker.models.adapter_form import Pair
from holdfast.worker.models.adapter_names import layer_of
from holdfast.worker.models.module_places import GATE_UP, Place

_DOWN: Final = "down_proj"
_UP: Final = "up_proj"
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_TURNED_UNTIL: Final = (0, 19, 0)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A weight of all experts."""

    name: str
    modules: tuple[str, ...]
    """Of each expert."""
    shape: tuple[int, int]
    """Outputs and inputs of an expert."""


Mixtures = Mapping[str, Mapping[str, _Parameter]]
"""Weights of experts, by layer and name."""


def mixtures_of(places: Mapping[str, Place | None]) -> Mixtures:
    """The mixtures of a layout."""
    experts: dict[tuple[str, str], list[str]] = {}
    shapes: dict[tuple[str, str], tuple[int, int]] = {}
    for key, place in places.items():
        if place is None or key.count(".") < 2:
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
        left = list(pairs)
        for parameter in mixture.values():
            if not folder.form.names_parameter(f"{owner}.{parameter.name}"):
                continue
            taken = [pair for pair in left if _is_turned(folder, pair, parameter) is not None]
            if not taken:
                raise folder.refused(_unfit(owner, parameter, left))
            left.remove(taken[0])
            found |= _each(folder, owner, taken[0], parameter)
        if left:
            raise folder.refused(
                f"{owner} has lora_A {left[0].a.shape} and lora_B {left[0].b.shape}, which are of no weight of its "
                "experts that target_parameters name"
            )
    return found


def _unfit(owner: str, parameter: _Parameter, left: list[Pair]) -> str:
    outputs, inputs = parameter.shape
    what = f"{owner}.{parameter.name}, whose experts have {inputs} inputs and {outputs} outputs"
    if not left:
        return f"target_parameters name {what}, and there are no tensors of it"
    of = " and ".join(f"lora_A {pair.a.shape} with lora_B {pair.b.shape}" for pair in left)
    return f"it has {of} for {what}: it is an adapter of another model"


def _is_turned(folder: AdapterFolder, pair: Pair, parameter: _Parameter) -> bool | None:
    """Whether the product of a pair is the transposed addition; None: it is of another weight."""
    found, (outputs, inputs) = (pair.b.shape[0], pair.a.shape[1]), parameter.shape
    if found not in ((outputs, inputs), (inputs, outputs)):
        return None
    if inputs != outputs:
        return found != (outputs, inputs)
    version = _VERSION.match(str(folder.form.config.get("peft_version")))
    if version is None:
        raise folder.refused(
            f"{parameter.name} of its experts has as many inputs as outputs, and without peft_version its tensors may "
            "be of either; load and save the adapter with PEFT 0.19.1 or later"
        )
    return tuple(map(int, version.groups())) <= _TURNED_UNTIL


def _each(folder: AdapterFolder, owner: str, pair: Pair, parameter: _Parameter) -> dict[str, LowRank]:
    """Matrices of each expert, which lie in those of all."""
    rank, scale = folder.form.rank_and_scale(folder.given, f"{owner}.{parameter.name}")
    (all_ranks, width), (height, _), count = pair.a.shape, pair.b.shape, len(parameter.modules)
    if all_ranks != rank * count or pair.b.shape[1] != all_ranks:
        raise folder.refused(
            f"{owner} has lora_A {pair.a.shape} and lora_B {pair.b.shape}, and must have {rank} ranks for each of "
            f"{count} experts of {parameter.name}"
        )
    is_turned = _is_turned(folder, pair, parameter)
    found = {}
    for number, module in enumerate(parameter.modules):
        of_a = pair.a.first + number * rank * width * pair.a.dtype.itemsize
        of_b = pair.b.first + number * pair.b.dtype.itemsize
        a = StoredMatrix(pair.a.dtype, (rank, width), of_a)
        b = StoredMatrix(pair.b.dtype, (height, rank), of_b, (all_ranks, count))
        found[module] = LowRank(a=b.turned, b=a.turned, scale=scale) if is_turned else LowRank(a=a, b=b, scale=scale)
    return found
