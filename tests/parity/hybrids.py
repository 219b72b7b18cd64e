"""Tiny random models whose layers keep states, and requests that run on them by way of the scheduler."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.worker.config import SchedulerConfig, SpeculationConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.request import EngineRequest, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation
from tests.parity.families import BASE, randomize

LFM2 = {"block_multiple_of": 8, "head_dim": ..., "num_hidden_layers": 3}
CONV, FULL = "conv", "full_attention"
PATTERNS: dict[str, dict[str, Any]] = {
    "conv, attention, conv": {"layer_types": [CONV, FULL, CONV]},
    "attention last": {"layer_types": [CONV, CONV, FULL], "conv_bias": True, "conv_L_cache": 4},
    "attention first": {"layer_types": [FULL, CONV, FULL], "block_auto_adjust_ff_dim": False},
    "no attention": {"layer_types": [CONV, CONV, CONV], "conv_L_cache": 2, "tie_word_embeddings": False},
    "odd channels": {"layer_types": [CONV, FULL, CONV], "hidden_size": 72, "num_attention_heads": 4, "conv_bias": True},
}
"""By name: what is changed of a tiny LFM2."""


def config_of(pattern: str, **changes: Any) -> Any:
    """The config of an LFM2 of a pattern, as transformers has it."""
    from transformers import AutoConfig

    values = {**BASE, **LFM2, **PATTERNS[pattern], **changes}
    return AutoConfig.for_model("lfm2", **{key: value for key, value in values.items() if value is not ...})


def save_config(folder: Path, pattern: str, **changes: Any) -> None:
    """Writes the config of an LFM2 to `folder`, whose weights are to be made up."""
    config_of(pattern, architectures=["Lfm2ForCausalLM"], **changes).save_pretrained(folder)


def save_hybrid(folder: Path, pattern: str, **changes: Any) -> Path:
    """Writes a random LFM2 of a pattern to `folder` and returns it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(pattern, **changes), dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    return folder


def request(name: str, prompt: Sequence[int], max_tokens: int, **values: Any) -> EngineRequest:
    """Drawn at random, with the log-probability of each token: its bits tell more than the token."""
    params = SamplingParams(seed=7, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
    return EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling_params=params, **values)


def scheduler_of(leader: LeaderRunner, drafts: int = 0, **values: Any) -> Scheduler:
    """As a replica makes it. `values`: of its settings, or of the scheduler itself."""
    info = leader._runner.info
    own = {"num_blocks": info.num_blocks, "num_state_slots": info.num_state_slots, "prefix_caching": True}
    own |= {key: values.pop(key) for key in own.keys() & values.keys()}
    config = SchedulerConfig(**values)
    speculation = SpeculationConfig(speculative="ngram" if drafts else "none", num_speculative_tokens=drafts or None)
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
