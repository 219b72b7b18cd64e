"""Turns a Hugging Face model into one rank of a tensor-parallel group, module by module.

What may live here: replacing linears, the vocabulary's embedding and head, and experts by ours, and cutting the
parameters that stay. What may not: which part belongs to whom (`parallel_plan.py`), arithmetic (`linear.py`,
`embedding.py`, `experts.py`). One whole parameter is held at a time, and only if it does not come from a mapped file.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.embedding import VocabParallelEmbedding, VocabParallelHead
from worker.errors import UnsupportedModelError
from worker.experts import Experts
from worker.linear import ColumnParallelLinear, Linear, RowParallelLinear
from worker.parallel_plan import LOCAL_COUNTS, ParallelPlan, Split, Style
from worker.row_tiles import RowTiles
from worker.tensor_parallel import TensorParallelGroup
from worker.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a rank's share goes, and what it is computed with."""

    group: TensorParallelGroup
    tiles: RowTiles
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
    modules = list(model.named_modules())
    for done, (name, module) in enumerate(modules, start=1):
        replacement = share.of(name, module)
        if replacement is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
        progress(done, len(modules))


class ScaledEmbedding(nn.Module):
    """An embedding whose vectors are multiplied by a constant (Gemma 3)."""

    def __init__(self, embedding: nn.Module, scale: Tensor) -> None:
        super().__init__()
        self.embedding = embedding
        self.register_buffer("scale", scale)

    def forward(self, token_ids: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(token_ids)
        return vectors * self.scale


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
        """What stands in for `module` on this rank; the module itself where only its tensors are exchanged."""
        if module is self._output:
            return self._head(module)
        if module is self._input:
            return self._embedding(name, module)
        style = self._plan.style(name)
        if type(module) is nn.Linear or _is_transposed_linear(module):
            return self._linear(name, module, style)
        if isinstance(module, nn.Linear) and self._plan.size > 1 and style.split is not Split.WHOLE:
            reason = f"{name} is a {type(module).__name__}, which cannot be split"
            raise UnsupportedModelError(self._model_type, reason, "Serve it with tensor_parallel_size 1")
        self._take_tensors(name, module, style)
        self._localize_counts(module)
        if self._target.device.type == "cpu" and Experts.can_replace(module):
            module = Experts(module, tiles=self._target.tiles)
        if style.split is Split.SUM and self._plan.size > 1:
            module.register_forward_hook(lambda _, inputs, output: self._target.group.all_reduce(output))
        return module

    def _linear(self, name: str, module: Any, style: Style) -> nn.Module:
        group, tiles = self._target.group, self._target.tiles
        weight = self._take(f"{name}.weight", module.weight, style, transposed=_is_transposed_linear(module))
        columns = style.split is Split.COLUMNS
        bias_style = style if columns else Style(split=Split.WHOLE)
        bias = None if module.bias is None else self._take(f"{name}.bias", module.bias, bias_style)
        if self._plan.size == 1 or style.split is Split.WHOLE:
            return Linear(weight, bias, tiles=tiles)
        if columns:
            return ColumnParallelLinear(weight, bias, group, tiles=tiles, gather_output=style.whole_activations)
        return RowParallelLinear(weight, bias, group, tiles=tiles, split_input=style.whole_activations)

    def _embedding(self, name: str, module: Any) -> nn.Module:
        """The vocabulary's embedding, by rows; a kind with a forward of its own, whole, unless it only scales."""
        scale = getattr(module, "embed_scale", None)
        if type(module) is not nn.Embedding and not isinstance(scale, Tensor):
            self._take_tensors(name, module, Style(split=Split.WHOLE))
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
        return VocabParallelHead(weight, bias, self._target.group, vocab_size=vocab_size, tiles=self._target.tiles)

    def _rows_of_vocabulary(self, parameter: Tensor) -> Tensor:
        """This rank's rows; the last rank's are filled up with zeros. A tied table is cut once."""
        key = id(parameter)
        if key not in self._tables:
            whole = self._source(self._first_names[key], parameter)
            num_rows = -(-len(whole) // self._plan.size)
            first = self._target.group.rank * num_rows
            rows = whole[first : first + num_rows]
            if len(rows) < num_rows:
                rows = torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])
            self._tables[key] = self._place(rows)
        return self._tables[key]

    def _take_tensors(self, name: str, module: nn.Module, style: Style) -> None:
        """Exchanges the parameters and buffers that are the module's own."""
        for key, parameter in module.named_parameters(recurse=False):
            full_name = f"{name}.{key}"
            own = self._plan.style(full_name)
            chosen = style if own.split is Split.WHOLE and style.split is not Split.SUM else own
            local = self._take(full_name, parameter, chosen)
            module.register_parameter(key, nn.Parameter(local, requires_grad=False))
        for key, buffer in module.named_buffers(recurse=False):
            saved = f"{name}.{key}" in self._saved
            module._buffers[key] = self._place(buffer) if saved else buffer.to(self._target.device)

    def _take(self, name: str, parameter: Tensor, style: Style, transposed: bool = False) -> Tensor:
        whole = self._source(self._first_names[id(parameter)], parameter)
        whole = whole.T if transposed else whole
        cut = self._plan.cut(name.removesuffix(".weight").removesuffix(".bias"), style, tuple(whole.shape), None)
        local = whole if cut is None else cut.take(whole, self._target.group.rank, self._plan.size)
        if style.split is Split.ONCE and self._target.group.rank > 0:
            local = torch.zeros_like(local)
        return self._place(local)

    def _place(self, tensor: Tensor) -> Tensor:
        """On the device, contiguous, in the serving dtype; what the checkpoint keeps in another dtype stays so."""
        dtype = self._target.dtype if tensor.dtype == self._stored_dtype else tensor.dtype
        return tensor.contiguous().to(self._target.device, dtype)

    def _localize_counts(self, module: nn.Module) -> None:
        if self._plan.size == 1 or not self._plan.splits_attention or not type(module).__name__.endswith("Attention"):
            return
        for path in LOCAL_COUNTS.get(self._model_type, ()):
            owner: Any = module
            if path.startswith("config."):
                module.config = owner = copy.copy(module.config)
            attribute = path.removeprefix("config.")
            setattr(owner, attribute, max(1, getattr(owner, attribute) // self._plan.size))


def _is_transposed_linear(module: nn.Module) -> bool:
    """GPT-2 keeps its weights as [input, output]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D
