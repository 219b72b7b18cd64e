"""Names of adapters' modules in the model: PEFT writes those of the model that it was given, and transformers may call
a module otherwise than the checkpoint does.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Final

from holdfast.worker.models.text_model import text_name

_LAYER: Final = re.compile(r"(.*?\.\d+|\d+)\.")
_ROUTERS: Final = ("gate", "router")
"""Ends of the names of routers."""
_BASE: Final = "model."
"""Beginning of the names in most of transformers' models with a head."""


def layer_of(module: str) -> str:
    """The part of a module's name up to the number of its layer; all of it where it is of none."""
    match = _LAYER.match(module)
    return module if match is None else match[1]


class ModuleNames:
    """Finds modules of the model by the names that an adapter has for them."""

    def __init__(self, modules: Iterable[str], routers: Iterable[str]) -> None:
        """`modules`: all names of the model's own. `routers`: those of mixtures among them."""
        self._modules = frozenset(modules)
        self._layers = {layer_of(name) for name in self._modules}
        self._routers = {layer_of(name): name for name in routers}
        in_layers = [name for name in self._layers if name not in self._modules]
        self._base = re.split(r"(layers|h)\.\d", min(in_layers))[0] if in_layers else ""

    def find(self, name: str) -> str | None:
        """The model's name of a module; None: the model has none."""
        known = next((one for one in self._candidates(name) if one in self._modules), None)
        if known is None and name.rpartition(".")[2] in _ROUTERS:
            layer = self.layer(layer_of(name))
            return None if layer is None else self._routers.get(layer)
        return known

    def layer(self, layer: str) -> str | None:
        """The model's name of a layer; None: the model has none."""
        return next((one for one in self._candidates(layer) if one in self._layers), None)

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        if (of_text := text_name(name)) is not None:
            yield of_text
        yield self._base + name
        yield self._base + name.removeprefix(_BASE)


def prefixes_of(layers: Mapping[str, str]) -> tuple[str, str]:
    """How the names of the model's modules begin, and those of the adapter's, by some of its layers."""
    for theirs, own in layers.items():
        pairs = zip(reversed(theirs), reversed(own), strict=False)
        end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return own[: len(own) - end], theirs[: len(theirs) - end]
    return "", ""
