"""Tiny models as the loader builds them, for one rank or several, and Hugging Face's own beside them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast.worker.distributed.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.layers.row_tiles import RowTiles
from holdfast.worker.model.model import register_attention
from holdfast.worker.model.parallel_plan import ParallelPlan
from holdfast.worker.model.parallelize import Target, parallelize
from holdfast.worker.model.weights import ATTENTION, loaded_weights
from tests.fake_group import run_ranks
from tests.parity.families import randomize, settings_of

T = TypeVar("T")

TOKENS = torch.randint(3, 126, (24,), generator=torch.Generator().manual_seed(2))


def config_of(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    model_type, values = settings_of(family)
    values = {**values, **changes}
    return AutoConfig.for_model(model_type, **{key: value for key, value in values.items() if value is not ...})


def hugging_face(config: Any, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """A random model, the same for the same config."""
    from transformers import AutoModelForCausalLM

    register_attention()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    randomize(model)
    return model.to(dtype).eval().requires_grad_(False)


def expected_logits(config: Any, token_ids: Tensor = TOKENS) -> Tensor:
    with torch.inference_mode():
        return hugging_face(config)(token_ids[None]).logits[0]


def parallelized(config: Any, group: TensorParallelGroup | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """One rank's tree, not settled."""
    group = group or SingleRank()
    cpu = torch.device("cpu")
    model = hugging_face(config, ATTENTION, dtype)
    plan = ParallelPlan(config, model.tp_plan or {}, group.size)
    parallelize(model, plan, loaded_weights, Target(group=group, tiles=RowTiles(cpu), device=cpu, dtype=dtype))
    return model


def on_ranks(size: int, work: Callable[[TensorParallelGroup], T]) -> list[T]:
    return run_ranks(size, work)
