"""Model of one rank: Hugging Face's modeling code with Holdfast's attention, linears and embedding, ready to run."""

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.executors.finite import check_finite
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.models.checks import OTHER_ENGINE
from holdfast.worker.models.compact import CompactSource, compact_tensors
from holdfast.worker.models.dry_run import find_attention, in_pieces
from holdfast.worker.models.linear import ProductOf, settle
from holdfast.worker.models.parallel_plan import ParallelPlan
from holdfast.worker.models.parallelize import Target, parallelize
from holdfast.worker.models.weights import (
    ATTENTION,
    DummyWeights,
    build_hf_model,
    load_checkpoint,
    loaded_weights,
)

logger = logging.getLogger(__name__)

_IGNORED: Final = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits"}
    | {"output_hidden_states", "return_dict"}
)
"""Keywords of an attention call that change nothing of its result."""

_NUM_DRY_TOKENS: Final = 4
_PADDING_CHECK: Final = "warn_if_padding_and_no_attention_mask"


class RankModel:
    """A callable model of one rank. `specs` says what each of its attention layers caches, in order."""

    def __init__(self, module: Any, target: Target) -> None:
        """`module` is a parallelized Hugging Face causal LM. All ranks of the group construct theirs together.

        Raises `UnsupportedModelError` where a dry run shows that the paged cache would not see the model's state.
        """
        self.module = module
        self._target = target
        _silence_padding_checks(module)
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        steps = torch.arange(_NUM_DRY_TOKENS, device=target.device)
        with in_pieces(module):
            calls = find_attention(module, lambda: self.logits(steps, steps, steps), target)
        self.specs = tuple(spec for _, spec in calls)
        self._attentions = tuple(caller for caller, _ in calls)

    def settle(
        self,
        kernel_of: ProductOf,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Gives the linears their kernels, once and before the first step; until then they are plain.

        `progress` gets linears done and in all. Raises `NotFiniteError` for a weight with a NaN or an infinity.
        """
        shares = (buffer for name, buffer in self.module.named_buffers() if name.endswith(".weight"))
        for weight in (*self.module.parameters(), *shares):
            check_finite(weight)
        settle(self.module, kernel_of, progress)

    def attach(self, attention: Callable[[int], Callable[..., Tensor]]) -> None:
        """Gives every attention layer its `PagedAttention`: `attention(i)` is called for layer i."""
        for index, module in enumerate(self._attentions):
            module.paged_attention = attention(index)

    def detach(self) -> None:
        """Removes all attached modules, and with them the cache."""
        for module in self._attentions:
            del module.paged_attention

    def __call__(self, batch: StepBatch) -> Tensor:
        """The logits [rows wanted, vocab] of a step, on every rank. The attention has been given the same step."""
        wanted = batch.logits_rows if len(batch.logits_rows) else batch.num_tokens[:1] - 1
        token_ids, positions, rows = (
            torch.from_numpy(array).to(self._target.device) for array in (batch.token_ids, batch.positions, wanted)
        )
        return self.logits(token_ids, positions, rows)[: len(batch.logits_rows)]

    def logits(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """The logits [W, vocab] of rows [W] among tokens [T] at their positions [T], int64, in the model's dtype."""
        kept = {"logits_to_keep": rows} if self._keeps_rows else {}
        output = self.module(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **kept
        )
        logits: Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[rows]


def _silence_padding_checks(module: Any) -> None:
    """Hugging Face's models look for padding among the tokens at every step, to warn of it: that reads a value on the
    host, which a GPU is waited for. There is no padding here.
    """
    for part in module.modules():
        if hasattr(part, _PADDING_CHECK):
            setattr(part, _PADDING_CHECK, _check_nothing)


def _check_nothing(*args: object, **kwargs: object) -> None:
    pass


def build_rank_model(
    config: ModelConfig, folder: Path, hf_config: Any, target: Target, progress: Callable[[int, int], None]
) -> RankModel:
    """Builds this rank's share of the model in `folder`; `settle` it before the first step.

    All ranks of the group do so together. Raises `UnsupportedModelError` where a gate refuses the model. `progress`
    gets modules done and in all.
    """
    return RankModel(build_tree(config, folder, hf_config, target, progress), target)


def build_tree(
    config: ModelConfig, folder: Path, hf_config: Any, target: Target, progress: Callable[[int, int], None]
) -> Any:
    """This rank's share as a tree of Hugging Face's modules and plain linears: nothing is tried out, packed or run.

    On a CPU its weights are views of the checkpoint where they can be. Otherwise like `build_rank_model`.
    """
    register_attention()
    if config.load_format == "dummy":
        module: Any = build_hf_model(hf_config)
        source: Any = DummyWeights(config.seed, target.device)
    elif (tensors := compact_tensors(folder, config.quantization)) is not None:
        module = build_hf_model(hf_config)
        source = CompactSource(tensors, module, target.dtype)
    else:
        module, source = load_checkpoint(folder, hf_config), loaded_weights
    if module.get_input_embeddings() is None or module.get_output_embeddings() is None:
        reason = "it has no single embedding or head for its vocabulary"
        raise UnsupportedModelError(hf_config.model_type, reason, OTHER_ENGINE)
    plan = ParallelPlan(hf_config, module.tp_plan or {}, target.group.size)
    parallelize(module, plan, source, target, progress)
    if isinstance(source, CompactSource):
        source.check_all_taken()
    if not module.is_backend_compatible():
        logger.warning(
            "transformers does not declare attention backends supported in %s models (_supports_attention_backend)",
            hf_config.model_type,
        )
    return module


def choose_device(config: ModelConfig) -> torch.device:
    """The device that the settings name; `auto` is a GPU where there is one. Raises `ConfigurationError`."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        reason = "has no CUDA" if torch.version.cuda is None else "sees no GPU (does `nvidia-smi` show one?)"
        raise ConfigurationError(
            f"model.device = 'cuda': the installed PyTorch {torch.__version__} {reason}; "
            "leave --device at auto, or set it to cpu"
        )
    return torch.device(config.device)


def serving_dtype(config: ModelConfig, hf_config: Any) -> torch.dtype:
    """The compute dtype: the setting, or else the checkpoint's, or else float32."""
    if config.dtype == "auto":
        return hf_config.dtype or torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def register_attention() -> None:
    """Makes `paged_attention` known to transformers. Its mask interface does not know the name: masks stay None."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function of Hugging Face's contract: query [1, H, T, D], key and value before repetition.

    Returns [1, T, H, Dv] and no weights. Raises `UnsupportedModelError` for a model that the paged cache cannot serve.
    """
    unknown = [name for name in others.keys() - _IGNORED if others[name] is not None]
    if attention_mask is not None or is_causal is False or unknown:
        what = ", ".join(sorted(unknown)) or "a separate mask"
        raise UnsupportedModelError(module.config.model_type, f"its attention is called with {what}", OTHER_ENGINE)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    output = module.paged_attention(
        query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux
    )
    return output.contiguous(), None  # some models view it, as they may what transformers' own functions return
