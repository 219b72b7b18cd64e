"""Adapters in a rank's layout: which linear gets which matrices of a folder, and whether all of them were applied."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch

from holdfast.worker.executors.adapters import EMBEDDING, HEAD, AdaptedLinear, Difference, place_of_all
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.adapter_experts import mixtures_of, of_experts
from holdfast.worker.models.adapter_folder import AdapterFolder
from holdfast.worker.models.adapter_form import AdapterForm
from holdfast.worker.models.adapter_names import ModuleNames, layer_of, prefixes_of
from holdfast.worker.models.adapter_tables import OwnTables, differing_row
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.module_places import is_of_expert, places_of

_PROOF_LIMIT: Final = 1e-4
"""Largest error of an addition, as a share of its usual size: sums are float32."""

Differences: TypeAlias = Mapping[str, Sequence[Difference]]
"""Between what an executor adds at each place and the product of matrices, by module, for fixed inputs."""


class AdapterPlaces:
    """The places of one rank's layout."""

    def __init__(self, config: Any, group: TensorParallelGroup, tables: OwnTables) -> None:
        """`config`: as `stated_config.py` has read it. `tables`: those of the checkpoint."""
        self._tables = tables
        self._is_whole = group.size == 1
        self._last: tuple[AdapterForm, AdapterForm] | None = None
        """The last form that was given the model's names, before and after."""
        self._places = {key: place for key, place in places_of(config, group).items() if place is not None}
        self._of_vocabulary = {name for key in (HEAD, EMBEDDING) for name in self._places[key].modules}
        self._mixtures = mixtures_of(self._places)
        self._shapes = {name: shape for place in self._places.values() for name, shape in place.with_shapes().items()}
        """Shapes [outputs, inputs] of the modules that may have adapters, of the whole model."""
        self._times = Counter(name for place in self._places.values() for name in place.with_shapes())
        """Places of each module: several of one that latent attention has by head."""
        self._names = ModuleNames(self._shapes, FAMILIES[config.model_type].stored_as)

    def named(self, folder: AdapterFolder) -> AdapterFolder:
        """The folder with the names of the whole model's modules, and the matrices of each expert.

        Raises `ConfigurationError` for matrices of experts that do not fit the model.
        """
        last = self._last
        if last is None or last[0] is not folder.form:
            self._last = last = folder.form, self._named(folder).form
        return replace(folder, form=last[1])

    def _named(self, folder: AdapterFolder) -> AdapterFolder:
        form = folder.form
        of_modules = {name: self._names.find(name) or name for name in (*form.modules, *form.copies)}
        layers = {layer_of(name): self._names.layer(layer_of(name)) for name in (*form.modules, *form.stacks)}
        own_layers = {theirs: own for theirs, own in layers.items() if own is not None and own != theirs}
        known = {theirs: own for theirs, own in layers.items() if own is not None}
        modules = {of_modules[name]: one for name, one in form.modules.items()}
        if len(modules) < len(form.modules):
            raise folder.refused("two of its modules are the same one of the model")
        modules |= of_experts(folder, known, self._mixtures)
        copies = {of_modules[name]: one for name, one in form.copies.items()}
        return folder.with_modules(modules, copies, prefixes_of(own_layers))

    def apply(self, folder: AdapterFolder) -> dict[str, AdaptedLinear]:
        """This rank's share of an adapter with the model's names, by linear. Every tensor is applied wherever the model
        has its module.

        Raises `ConfigurationError` for a module that the model does not have, or whose linear takes no adapter, for a
        tensor of another shape, and for a target of the adapter without tensors.
        """
        assert not folder.form.stacks, "the adapter's modules have the names of the model's"
        for name, one in folder.modules.items():
            shape = self._shapes.get(name)
            if shape is None:
                raise folder.refused(
                    f"{name} is no module of this model that takes an adapter; such are linears of its layers, as "
                    f"{next(iter(self._shapes), 'none')}, the embedding and the head"
                )
            if (one.b.shape[0], one.a.shape[1]) != shape:
                raise folder.refused(
                    f"{name} has lora_A {one.a.shape} and lora_B {one.b.shape}, and the model's linear "
                    f"has {shape[1]} inputs and {shape[0]} outputs: it is an adapter of another model"
                )
        self._check_complete(folder)
        found = {key: place.adapted(folder.modules) for key, place in self._places.items()}
        return {key: adapted for key, adapted in found.items() if adapted is not None}

    def prove(self, folder: AdapterFolder, differences: Differences, dtype: torch.dtype) -> bool:
        """Whether an adapter adds anything to fixed inputs. `differences`: by place, between the executor's addition,
        with the packed matrices and the products of a step, and that of a merged model's weights.

        Raises `ConfigurationError` if they are not equal, if a tensor is applied at two places or at none, if rounding
        to the model's `dtype` leaves nothing of the adapter, and for a NaN or an infinity: one that is applied makes a
        difference that is not a number.
        """
        if folder.form.copies or not self._is_whole:
            folder.check_finite()
        times, has_effect = Counter[str](), False
        for key, of_parts in differences.items():
            names = self._places[key].modules_of(folder.modules)
            for name, (error, largest, usual) in zip(names, of_parts, strict=True):
                if name not in folder.modules:
                    continue
                times[name] += 1
                if not error <= _PROOF_LIMIT * max(usual, largest):  # NaN is refused, too
                    folder.check_finite()
                    raise folder.refused(
                        f"{name}: its addition to fixed inputs is not the product of its matrices in {dtype} (it "
                        f"differs by {error:.3g}, of numbers up to {max(usual, largest):.3g})"
                    )
                has_effect = has_effect or largest > 0
        if wrong := [name for name in folder.modules if times[name] != self._times[name]]:
            raise folder.refused(
                f"{wrong[0]} is applied {times[wrong[0]]} times, and must be applied {self._times[wrong[0]]} times"
            )
        if not has_effect and folder.has_effect:
            raise folder.refused(f"its numbers are too small for the model's {dtype}: nothing of it would be added")
        return has_effect

    def check_copies(self, folder: AdapterFolder) -> None:
        """Raises `ConfigurationError` where an adapter's copies of the model's table and head, which PEFT saves beside
        an adapter of theirs, are those of another model.
        """
        for name, copy in folder.form.copies.items():
            if name not in self._of_vocabulary or name not in folder.modules:
                raise folder.refused(f"{name}.base_layer.weight is no copy of the model's embedding or head")
            own = self._tables.of(name)
            if tuple(own.shape) != copy.shape:
                raise folder.refused(
                    f"{name}.base_layer.weight is {copy.shape}, and the model's weight {tuple(own.shape)}: it is an "
                    "adapter of another model"
                )
            if (row := differing_row(own, copy.of(folder.content.whole))) is not None:
                raise folder.refused(
                    f"row {row} of {name}.base_layer.weight is not that of the model: its table was changed, or it is "
                    "an adapter of another model; serve the model that it was made of"
                )

    def _check_complete(self, folder: AdapterFolder) -> None:
        """Layers that it has nothing of may have been left out (`layers_to_transform`), and so may experts and routers,
        which PEFT takes for linears in some versions alone; the others are whole.
        """
        layers, form = {layer_of(name) for name in folder.modules}, folder.form
        if form.targets != "all-linear" and not form.prefixes[0]:
            layers |= self._of_vocabulary
        names = {key: place.modules_of(folder.modules) for key, place in self._places.items()}
        there = {place_of_all(key) for key, of_place in names.items() if any(one in folder.modules for one in of_place)}
        whole = [key for key in names if place_of_all(key) in there or not _is_of_mixture(key)]
        for name in sorted(one for key in whole for one in names[key] if one not in folder.modules):
            if layer_of(name) in layers and form.names(folder.given, name):
                raise folder.refused(f"target_modules name {name}, and there are no tensors of it")


def _is_of_mixture(place: str) -> bool:
    """Whether a place is that of a router, or of one expert of several."""
    return place.endswith(".router") or is_of_expert(place)
