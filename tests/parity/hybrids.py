"""Tiny random models whose layers keep states, and requests that run on them by way of the scheduler."""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from holdfast.worker.config import SchedulerConfig, SpeculationConfig, WorkerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.request import EngineRequest, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation
from tests.parity.families import BASE, randomize
from tests.parity.harness import worker_config

CONV, LINEAR, FULL = "conv", "linear_attention", "full_attention"
LFM2: dict[str, Any] = {"block_multiple_of": 8, "head_dim": ..., "num_hidden_layers": 3}
LFM2_MOE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "head_dim": ...,
}
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
DENSE, MIXTURE, NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
DELTA_NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (DENSE, DELTA_NET),
    "mixture": (MIXTURE, {**DELTA_NET, **EXPERTS}),
    "by key heads, mixture": (NEXT, {**DELTA_NET, **EXPERTS}),
    "by key heads, one layer dense": (NEXT, {**DELTA_NET, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "state last": (
        DENSE,
        {**DELTA_NET, "layer_types": [FULL, LINEAR, LINEAR], "num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
    "delta nets alone": (
        DENSE,
        {**DELTA_NET, "layer_types": [LINEAR] * 2, "num_hidden_layers": 2, "linear_num_value_heads": 4},
    ),
    "wide values, short window": (DENSE, {**DELTA_NET, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 2}),
    "long keys, biases": (
        DENSE,
        {**DELTA_NET, "linear_key_head_dim": 80, "attention_bias": True, "linear_conv_kernel_dim": 6},
    ),
}
KIMI: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": ...,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 512,
}
KIMIS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi": ("kimi_linear", {**KIMI, "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}),
    "kimi, latents last": (
        "kimi_linear",
        {
            **KIMI,
            "num_hidden_layers": 2,
            "layer_types": [LINEAR, FULL],
            "linear_head_dim": 16,
            "linear_num_heads": 8,
            "linear_conv_kernel_dim": 2,
            "q_lora_rank": 24,
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "kimi, linear alone": (
        "kimi_linear",
        {**KIMI, "num_hidden_layers": 2, "layer_types": [LINEAR] * 2, "linear_head_dim": 48, "norm_topk_prob": False},
    ),
}
MAMBA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "hidden_size": 64,
    "max_position_embeddings": 512,
}
GRANITE: dict[str, Any] = {
    **MAMBA,
    "num_hidden_layers": 3,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "head_dim": ...,
}
NEMOTRON: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "time_step_min": 0.3,
    "max_position_embeddings": 512,
    "num_hidden_layers": ...,
}
ALONE: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 16,
    "hidden_size": 64,
    "state_size": 16,
    "expand": 2,
    "n_groups": 2,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), ...),
}
FALCON: dict[str, Any] = {
    **MAMBA,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 2,
    "head_dim": 16,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "mlp_multipliers": [0.9, 0.6],
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.5],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}
MOE, MLP, BOTH = "moe", "mlp", "hybrid"
MAMBAS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite, dense": (
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": [LINEAR, FULL, LINEAR]},
    ),
    "granite, mixture": (
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 4, "intermediate_size": 32, "layer_types": [LINEAR, LINEAR, FULL]},
    ),
    "granite, attention alone, rotated": (
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 0, "layer_types": [FULL] * 3, "position_embedding_type": "rope"},
    ),
    "granite, Mamba2 alone": (
        "granitemoehybrid",
        {
            **GRANITE,
            "num_local_experts": 0,
            "layer_types": [LINEAR] * 3,
            "mamba_d_head": "auto",
            "mamba_n_heads": 4,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "bamba": ("bamba", {**MAMBA, "head_dim": ..., "attn_layer_indices": [1], "num_hidden_layers": 3}),
    "falcon": ("falcon_h1", FALCON),
    "falcon, biases": (
        "falcon_h1",
        {**FALCON, "mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True, "mamba_n_groups": 1},
    ),
    "falcon, norms": (
        "falcon_h1",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_heads": 4, "mamba_d_head": 32},
    ),
    "nemotron": ("nemotron_h", {**NEMOTRON, "layers_block_type": [LINEAR, MOE, FULL, MLP, LINEAR]}),
    "nemotron, odd halves": (
        "nemotron_h",
        {**NEMOTRON, "n_groups": 1, "layers_block_type": [MLP, LINEAR, FULL, LINEAR, MOE, MOE]},
    ),
    "nemotron, latent experts": (
        "nemotron_h",
        {
            **NEMOTRON,
            "moe_latent_size": 48,
            "moe_intermediate_size": 40,
            "mlp_bias": True,
            "layers_block_type": [LINEAR, MOE, FULL, MOE],
        },
    ),
    "nemotron, attention last": (
        "nemotron_h",
        {**NEMOTRON, "n_groups": 8, "use_bias": True, "mlp_bias": True, "layers_block_type": [LINEAR, MLP, FULL]},
    ),
    "Mamba2 alone": ("mamba2", ALONE),
    "Mamba2 alone, biases": (
        "mamba2",
        {**ALONE, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
}
NORMS_GROUPS: bool = "group_size" in inspect.signature(MambaRMSNormGated).parameters
"""Whether transformers norms each group of Mamba2 alone by itself, as the model's authors do; 5.17 norms all as one."""


def has_reference(config: Any) -> bool:
    """Whether Hugging Face's modules of this version are right for a model with this config."""
    return NORMS_GROUPS or config.model_type != "mamba2" or config.n_groups == 1


PATTERNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("lfm2", {**LFM2, **changes})
        for name, changes in {
            "conv, attention, conv": {"layer_types": [CONV, FULL, CONV]},
            "attention last": {"layer_types": [CONV, CONV, FULL], "conv_bias": True, "conv_L_cache": 4},
            "attention first": {"layer_types": [FULL, CONV, FULL], "block_auto_adjust_ff_dim": False},
            "convolutions alone": {"layer_types": [CONV, CONV, CONV], "conv_L_cache": 2, "tie_word_embeddings": False},
            "odd channels": {
                "layer_types": [CONV, FULL, CONV],
                "hidden_size": 72,
                "num_attention_heads": 4,
                "conv_bias": True,
            },
        }.items()
    },
    "conv, mixture": ("lfm2_moe", {**LFM2_MOE, "layer_types": [CONV, FULL, CONV, CONV]}),
    "conv, mixture, chosen by weight": (
        "lfm2_moe",
        {**LFM2_MOE, "layer_types": [CONV, CONV, FULL, FULL], "use_expert_bias": False, "norm_topk_prob": False},
    ),
    **DELTA_NETS,
    **KIMIS,
    **MAMBAS,
}
"""By name: the model type, and what is changed of a tiny config."""


def config_of(pattern: str, **changes: Any) -> Any:
    """The config of a pattern, as transformers has it."""
    from transformers import AutoConfig

    model_type, values = PATTERNS[pattern]
    given = {**BASE, **values, **changes}
    return AutoConfig.for_model(model_type, **{key: value for key, value in given.items() if value is not ...})


def save_config(folder: Path, pattern: str, **changes: Any) -> None:
    """Writes the config of an LFM2 to `folder`, whose weights are to be made up."""
    config_of(pattern, architectures=["Lfm2ForCausalLM"], **changes).save_pretrained(folder)


def made(pattern: str, **changes: Any) -> Any:
    """Hugging Face's model of a pattern, random: the same for the same pattern."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(pattern, **changes), dtype=torch.float32)
    randomize(model)
    return model.eval().requires_grad_(False)


def save_hybrid(folder: Path, pattern: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Writes the model of a pattern to `folder` and returns it."""
    made(pattern, **changes).to(dtype).save_pretrained(folder)
    return folder


def request(name: str, prompt: Sequence[int], max_tokens: int, **values: Any) -> EngineRequest:
    """Drawn at random, with the log-probability of each token: its bits tell more than the token."""
    params = SamplingParams(seed=7, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
    return EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling_params=params, **values)


def scheduler_of(leader: LeaderRunner, drafts: int = 0, **values: Any) -> Scheduler:
    """As a replica makes it. `values`: of its settings, or of the scheduler itself."""
    info = leader._runner.info
    own = {"num_blocks": info.num_blocks, "num_state_slots": info.num_state_slots, "prefix_caching": True}
    own |= {"window": info.window, "state_blocks": info.state_blocks}
    own |= {key: values.pop(key) for key in own.keys() & values.keys()}
    usual = SpeculationConfig(speculative="ngram" if drafts else "none", num_speculative_tokens=drafts or None)
    speculation = values.pop("speculation", usual)
    config = SchedulerConfig(**values)
    return Scheduler(
        config,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(),
        drafter=Speculation(speculation, config),
        **own,
    )


Said = dict[str, list[TokenLogprob]]


def start(scheduler: Scheduler, leader: LeaderRunner, requests: Sequence[EngineRequest], num_steps: int) -> Said:
    """What each request is told in so many steps, all of them together. They go on in the next `run_all`."""
    for each in requests:
        scheduler.add(each)
    said: Said = defaultdict(list)
    for _ in range(num_steps):
        if (plan := scheduler.plan()) is None:
            break
        for delta in scheduler.commit(plan, leader.run(plan)):
            said[str(delta.attempt)] += delta.logprobs
        scheduler.check_integrity()
    return said


def run_all(scheduler: Scheduler, leader: LeaderRunner, requests: Sequence[EngineRequest]) -> Said:
    """What each request is told until all have ended, those that run already included."""
    return dict(start(scheduler, leader, requests, num_steps=10_000))


def told_alone(leader: LeaderRunner, requests: Sequence[EngineRequest]) -> Said:
    """What each is told by itself, without a cache."""
    said: Said = {}
    for each in requests:
        said |= run_all(scheduler_of(leader, prefix_caching=False), leader, [each])
    return said


def drafting_config(folder: Path, size: int = 1) -> WorkerConfig:
    """Of a worker with drafts by prompt lookup."""
    worker = worker_config(folder, size)
    return worker.model_copy(update={"speculation": worker.speculation.model_copy(update={"speculative": "ngram"})})
