"""Tiny models as the loader builds them, for one rank or several, and Hugging Face's own beside them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models.families import DECODERS, FAMILIES
from holdfast.worker.models.model import register_attention
from holdfast.worker.models.native_backend import prepare
from holdfast.worker.models.parallel_plan import ParallelPlan
from holdfast.worker.models.parallelize import Target, parallelize
from holdfast.worker.models.proof import Prepared
from holdfast.worker.models.stated_config import read_stated_config
from holdfast.worker.models.stated_layout import stated_layout
from holdfast.worker.models.stated_tensors import StoredTensors
from holdfast.worker.models.weights import ATTENTION, loaded_weights
from tests.fake_group import run_ranks
from tests.parity.families import ENCODERS, VARIANTS, YARN, randomize, settings_of

T = TypeVar("T")

TOKENS = torch.randint(3, 126, (24,), generator=torch.Generator().manual_seed(2))


HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
"""Rotary angles for half of each head."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name, family in DECODERS.items() if not family.keeps_state},
    "olmo": ("olmo", {"clip_qkv": None}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "num_hidden_layers": 2}),
    "phi3, half of each head turned": ("phi3", {"rope_parameters": HALF}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen2_moe, one layer dense": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "qwen2_moe, normalized": ("qwen2_moe", {"norm_topk_prob": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "gemma3_text, softcap": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "phi, norms of heads": ("phi", {"qk_layernorm": True}),
    "gemma4_text, dense": ("gemma4_text", {"enable_moe_block": False, "attention_k_eq_v": False}),
    "glm4_moe, groups": ("glm4_moe", {"n_routed_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3, groups and yarn": (
        "deepseek_v3",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "rope_interleave": False,
            "kv_lora_rank": 24,
            "v_head_dim": 20,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "hunyuan_v1_dense, dynamic": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}},
    ),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    **{name: (name, {}) for name, (family, _) in VARIANTS.items() if family in DECODERS},
}
"""Tiny models by name: a family or variant of the parity tests, and what is changed of it."""

ENCODER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ENCODERS},
    "bert, approximate": ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "type_vocab_size": 1}),
    "modernbert, biases": ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    "modernbert, windows first": ("modernbert", {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
}
"""Likewise, encoders."""


def config_of(model: str, **changes: Any) -> Any:
    """The config of a tiny model by its name."""
    from transformers import AutoConfig

    family, more = (MODELS | ENCODER_MODELS).get(model, (model, {}))
    model_type, values = settings_of(family)
    values = {**values, **more, **changes}
    return AutoConfig.for_model(model_type, **{key: value for key, value in values.items() if value is not ...})


def hugging_face(config: Any, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """A random model, the same for the same config."""
    from transformers import AutoModel, AutoModelForCausalLM

    register_attention()
    kind = AutoModel if config.model_type in ENCODERS else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention)
    randomize(model)
    return model.to(dtype).eval().requires_grad_(False)


def expected_logits(config: Any, token_ids: Tensor = TOKENS) -> Tensor:
    """Of an encoder, by its table."""
    model = hugging_face(config)
    with torch.inference_mode():
        output = model(token_ids[None])
        if config.model_type in ENCODERS:
            return output.last_hidden_state[0] @ model.get_input_embeddings().weight.T
        return output.logits[0]


def layout_of(
    config: Any, group: TensorParallelGroup | None = None, dtype: torch.dtype = torch.float32
) -> DecoderLayout:
    """One rank's layout of a random model."""
    return layout_of_module(hugging_face(config, dtype=dtype), group or SingleRank())


def layout_of_module(model: Any, group: TensorParallelGroup, stored: torch.dtype | None = None) -> DecoderLayout:
    """One rank's layout of a model in memory, whose checkpoint is of the type `stored`."""
    is_encoder = model.config.model_type in ENCODERS
    is_tied = is_encoder or model.get_output_embeddings().weight is model.get_input_embeddings().weight
    own = {"architectures": None, "dtype": str(stored or model.dtype), "tie_word_embeddings": is_tied}
    stated = read_stated_config({**model.config.to_dict(), **own})
    state = {name: values for name, values in model.state_dict().items() if not (is_tied and name == "lm_head.weight")}
    tensors = StoredTensors(InMemory(state), FAMILIES[stated.model_type], None)
    return stated_layout(stated, tensors, group, model.dtype)


class InMemory:
    """Tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.left = set(tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if name not in self.left:
            return None
        self.left.remove(name)
        return self._tensors[name]


def prepared(layout: DecoderLayout, group: TensorParallelGroup | None = None, **sizes: Any) -> Prepared:
    """With the answers of the reference."""
    found = prepare(layout, None, group or SingleRank(), **sizes)
    assert isinstance(found, Prepared), found
    return found


def parallelized(config: Any, group: TensorParallelGroup | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """One rank's tree, not settled."""
    return share_of(hugging_face(config, ATTENTION, dtype), group or SingleRank())


def share_of(model: Any, group: TensorParallelGroup) -> Any:
    """One rank's tree of a loaded model."""
    cpu = torch.device("cpu")
    plan = ParallelPlan(model.config, model.tp_plan or {}, group.size)
    parallelize(model, plan, loaded_weights, Target(group=group, device=cpu, dtype=model.dtype))
    return model


def on_ranks(size: int, work: Callable[[TensorParallelGroup], T]) -> list[T]:
    return run_ranks(size, work)
