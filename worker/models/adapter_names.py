"""Names of adapters' modules in the model: PEFT writes those of the model that it was given, which may have been a part
of ours, or a larger one; adapters made with older versions of transformers have the names of the files.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Final

from holdfast.worker.models.text_model import text_name

_LAYER: Final = re.compile(r"(.*?\.\d+|\d+)\.")
_WEIGHT: Final = ".weight"


def layer_of(module: str) -> str:
    """The part of a module's name up to the number of its layer; all of it where it is of none."""
    match = _LAYER.match(module)
    return module if match is None else match[1]


class ModuleNames:
    """Finds modules of the model by the names that an adapter has for them."""

    def __init__(self, modules: Iterable[str], stored_as: Iterable[tuple[str, str]]) -> None:
        """`modules`: all names of the model's own. `stored_as`: parts of tensors' names, and what files have there."""
        self._modules = frozenset(modules)
        self._layers = {layer_of(name) for name in self._modules}
        self._stored_as = tuple(stored_as)
        in_layers = [name for name in self._layers if name not in self._modules]
        self._base = re.split(r"(layers|h)\.\d", min(in_layers))[0] if in_layers else ""

    def find(self, name: str) -> str | None:
        """The model's name of a module; None: the model has none."""
        return next((one for one in self._candidates(name) if one in self._modules), None)

    def layer(self, layer: str) -> str | None:
        """The model's name of a layer; None: the model has none."""
        return next((one for one in self._candidates(layer) if one in self._layers), None)

    def _candidates(self, name: str) -> Iterator[str]:
        for of_file in dict.fromkeys((name, self._base + name, text_name(name) or name)):
            yield of_file
            yield self._from_file(of_file)
        *outer, _, last = ["", *name.split(".")]
        yield ".".join([*outer[1:], last])  # Kimi Linear's gates are modules of a module

    def _from_file(self, name: str) -> str:
        known = name + _WEIGHT
        for ours, theirs in reversed(self._stored_as):
            known = known.replace(theirs, ours)
        return known.removesuffix(_WEIGHT)


def prefixes_of(layers: Mapping[str, str]) -> tuple[str, str]:
    """Beginnings of the names of the model's modules and of the adapter's, by some of its layers."""
    for theirs, own in layers.items():
        pairs = zip(reversed(theirs), reversed(own), strict=False)
        end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return own[: len(own) - end], theirs[: len(theirs) - end]
    return "", ""
