"""Tensor parallelism of a Hugging Face model: replaces its modules by one rank's share of them. One whole parameter is
held at a time, and only if it does not come from a mapped file.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.layout_arithmetic import slices_of_rank
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.experts import ExpertRouter, Experts
from holdfast.worker.models.family_rules import num_kv_heads
from holdfast.worker.models.linear import (
    ColumnParallelLinear,
    Linear,
    RowActivation,
    RowParallelLinear,
    ScaledEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from holdfast.worker.models.parallel_plan import (
    LOCAL_COUNTS,
    ParallelPlan,
    Split,
    Style,
    is_transposed_linear,
    vocabulary_rows,
)
from holdfast.worker.models.weights import WeightSource, loaded_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device of a rank's share, and the dtype that it is computed in."""

    group: TensorParallelGroup
    device: torch.device
    dtype: torch.dtype


def parallelize(
    model: Any,
    plan: ParallelPlan,
    source: WeightSource,
    target: Target,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Replaces the modules of `model` (a Hugging Face causal LM) by this rank's share, on the target's device.

    Raises `UnsupportedModelError` where the plan does not fit the modules. `progress` gets modules done and in all.
    """
    share = _Share(model, plan, source, target)
    modules = list(model.named_modules())[::-1]  # submodules are exchanged before their module
    for done, (name, module) in enumerate(modules, start=1):
        replacement = share.of(name, module)
        if replacement is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
        progress(done, len(modules))


class _Share:
    """One rank's share of a model."""

    def __init__(self, model: Any, plan: ParallelPlan, source: WeightSource, target: Target) -> None:
        self._model = model
        self._plan = plan
        self._source = source
        self._target = target
        self._model_type: str = model.config.model_type
        self._stored_dtype = model.dtype
        self._first_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._saved = set(model.state_dict())
        self._input = model.get_input_embeddings()
        self._output = model.get_output_embeddings()
        self._tables: dict[int, Tensor] = {}

    def of(self, name: str, module: nn.Module) -> nn.Module:
        """Replacement of `module` on this rank; the module itself where only its tensors are exchanged."""
        if module is self._output:
            return self._head(module)
        if module is self._input:
            return self._embedding(name, module)
        style = self._plan.style(name)
        if type(module) is nn.Linear or is_transposed_linear(module):
            return self._linear(name, module, style)
        if isinstance(module, nn.Linear) and style.split is not Split.WHOLE:
            reason = f"{name} is a {type(module).__name__}, which cannot be split"
            raise UnsupportedModelError(self._model_type, reason, "Serve it with tensor_parallel_size 1")
        if style.split is Split.SUM:
            self._check_partial_sum(name, module)
        self._take_tensors(name, module)
        self._localize_counts(module)
        module = self._row_invariant(module)
        if style.split is Split.SUM:
            if isinstance(module, Experts):
                module.is_partial = True
            module.register_forward_hook(lambda _, inputs, output: self._target.group.all_reduce(output))
        return module

    def _row_invariant(self, module: nn.Module) -> nn.Module:
        """On a GPU activations take each number by itself, and routers multiply by the device's product."""
        if Experts.can_replace(module):
            return Experts(module)
        if self._target.device.type != "cpu":
            return module
        if RowActivation.can_replace(module):
            return RowActivation(module)
        return ExpertRouter(module) if ExpertRouter.can_replace(module) else module

    def _check_partial_sum(self, name: str, module: nn.Module) -> None:
        """A tensor that is whole on every rank inside a sum over ranks would count once for each rank."""
        whole = [key for key, _ in module.named_parameters() if self._plan.parameter_style(f"{name}.{key}") == Style()]
        if whole:
            reason = f"{name}.{whole[0]} is part of a sum over ranks, and its tensor-parallel plan does not split it"
            raise UnsupportedModelError(self._model_type, reason, "Serve it with tensor_parallel_size 1")

    def _linear(self, name: str, module: Any, style: Style) -> nn.Module:
        group = self._target.group
        weight = self._take(f"{name}.weight", module.weight, transposed=is_transposed_linear(module), strided=True)
        bias = None if module.bias is None else self._take(f"{name}.bias", module.bias)
        if style.split is Split.WHOLE:
            linear = Linear(weight, bias)
            if group.size == 1 and self._plan.is_summed(name):
                linear.num_slices = self._slices(weight.shape[1])
            return linear
        if style.split is Split.COLUMNS:
            return ColumnParallelLinear(weight, bias, group, gather_output=style.whole_activations)
        slices = self._slices(weight.shape[1])
        return RowParallelLinear(weight, bias, group, num_slices=slices, split_input=style.whole_activations)

    def _slices(self, num_inputs: int) -> int:
        """Slices in which this rank adds up its inputs of a row-parallel linear, as the native executors do."""
        config, group = self._model.config, self._target.group
        num_heads = getattr(config, "num_attention_heads", 1)
        kv_heads = num_kv_heads(config) if hasattr(config, "num_attention_heads") else num_heads
        return slices_of_rank(num_inputs * group.size, num_heads, kv_heads, group.rank, group.size)

    def _embedding(self, name: str, module: nn.Embedding) -> nn.Module:
        """The vocabulary's embedding, by rows; an embedding with its own forward whole, unless it only scales."""
        scale = getattr(module, "embed_scale", None)
        if type(module) is not nn.Embedding and not isinstance(scale, Tensor):
            self._take_tensors(name, module)
            return module
        table = self._rows_of_vocabulary(module.weight)
        first_row = self._target.group.rank * len(table)
        embedding = VocabParallelEmbedding(table, first_row, self._target.group)
        if isinstance(scale, Tensor):
            return ScaledEmbedding(embedding, scale.to(self._target.device, table.dtype))
        return embedding

    def _head(self, module: Any) -> nn.Module:
        weight = self._rows_of_vocabulary(module.weight)
        bias = None if module.bias is None else self._rows_of_vocabulary(module.bias)
        vocab_size = module.weight.shape[0]
        return VocabParallelHead(weight, bias, self._target.group, vocab_size=vocab_size)

    def _rows_of_vocabulary(self, parameter: Tensor) -> Tensor:
        """This rank's rows; the last rank's are filled up with zeros. A tied table is cut once."""
        key = id(parameter)
        if key not in self._tables:
            whole = self._source(self._first_names[key], parameter)
            self._tables[key] = self._place(
                vocabulary_rows(whole, self._target.group.rank, self._plan.size, whole.dtype)
            )
        return self._tables[key]

    def _take_tensors(self, name: str, module: nn.Module) -> None:
        """Exchanges the parameters and buffers that are the module's own."""
        for key, parameter in module.named_parameters(recurse=False):
            local = self._take(f"{name}.{key}", parameter)
            module.register_parameter(key, nn.Parameter(local, requires_grad=False))
        for key, buffer in module.named_buffers(recurse=False):
            saved = f"{name}.{key}" in self._saved
            setattr(module, key, self._place(buffer) if saved else buffer.to(self._target.device))

    def _take(self, name: str, parameter: Tensor, *, transposed: bool = False, strided: bool = False) -> Tensor:
        """This rank's share of a parameter, where it will be used. `strided`: it may stay a view of the whole."""
        rank, size = self._target.group.rank, self._plan.size
        whole = self._source(self._first_names[id(parameter)], parameter)
        whole = whole.T if transposed else whole
        attention = self._model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
        cut = self._plan.cut(name, tuple(whole.shape), getattr(attention, "head_dim", None))
        local = whole if cut is None else cut.take(whole, rank, size)
        if cut is not None and self._source is not loaded_weights:
            local = local.clone()  # a view would keep the whole in memory
        if rank > 0 and self._plan.parameter_style(name).split is Split.ONCE:
            local = torch.zeros_like(local)
        return self._place(local, strided)

    def _place(self, tensor: Tensor, strided: bool = False) -> Tensor:
        """On the device, in the serving dtype; tensors that the checkpoint keeps in another dtype stay in it.

        Contiguous, unless it may be `strided`: then a CPU copies nothing, and reads only the used part of a file.
        """
        dtype = self._target.dtype if tensor.dtype == self._stored_dtype else tensor.dtype
        stays = strided and self._target.device.type == "cpu"
        return (tensor if stays else tensor.contiguous()).to(self._target.device, dtype)

    def _localize_counts(self, module: nn.Module) -> None:
        """Modeling code that shapes its tensors by a number of heads gets the number that this rank has."""
        if not self._plan.splits_attention or not type(module).__name__.endswith("Attention"):
            return
        for path in LOCAL_COUNTS.get(self._model_type, ()):
            owner: Any = module
            if path.startswith("config."):
                module.config = owner = copy.copy(module.config)
            attribute = path.removeprefix("config.")
            setattr(owner, attribute, max(1, getattr(owner, attribute) // self._plan.size))
