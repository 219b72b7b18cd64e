"""Benchmark of a prefix that is cached: the first token of a long prompt, computed and found, in one run.

    python -m benchmarks.prefix_hits [--tokens 8192] [--rounds 3] [--threads 1] [--models "NAME;NAME"]

Models have the shapes of real ones, with fewer layers and random weights in bfloat16, and a vocabulary of 4,096. In
each round a prompt that nobody has asked is computed, and then asked again with another last token, which finds all
but its last block: in models that keep states by a snapshot. Printed: CPU seconds of the process until the first
token, the least of the rounds, and how many times as long computing took.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler

LINEAR, FULL = "linear_attention", "full_attention"
VOCABULARY: Final = 4096
_QWEN: Final = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR] * 3 + [FULL],
    "linear_num_key_heads": 16,
    "rms_norm_eps": 1e-6,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "LFM2-1.2B, 6 layers": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", FULL] * 2,
    },
    "Qwen3.5-0.8B, 4 layers": {
        **_QWEN,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
    },
    "Qwen3.5-4B, 4 layers": {
        **_QWEN,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
    "Llama-3.2-1B, 4 layers": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
    },
}


def loaded(values: dict[str, Any], num_tokens: int, threads: int) -> LeaderRunner:
    """A replica of one rank, of a model of this config."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * num_tokens, "dtype": "bfloat16", **values}
        Path(folder, "config.json").write_text(json.dumps(config))
        worker = WorkerConfig(
            model=ModelConfig(model=folder, load_format="dummy", device="cpu"),
            parallel=ParallelConfig(num_threads=threads),
            cache=CacheConfig(num_blocks=3 * num_tokens // 16, num_state_slots=32),
        )
        group = SingleRank()
        return LeaderRunner(ModelRunner.load(worker, group, device=torch.device("cpu")), group)


def first_token_s(leader: LeaderRunner, scheduler: Scheduler, prompt: Sequence[int]) -> tuple[float, int]:
    """CPU seconds until the first token of a prompt, and how many of its tokens were found."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    before = scheduler.stats().num_prefix_hit_tokens
    scheduler.add(EngineRequest(request_id="one", prompt_token_ids=tuple(prompt), sampling_params=params))
    began_s = time.process_time()
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, leader.run(plan))
    return time.process_time() - began_s, scheduler.stats().num_prefix_hit_tokens - before


def measured(values: dict[str, Any], num_tokens: int, rounds: int, threads: int) -> tuple[float, float, int]:
    """The least CPU seconds computed and found, and the tokens that were found."""
    leader = loaded(values, num_tokens, threads)
    info, generator = leader._runner.info, random.Random(0)
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=256),
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(),
        prefix_caching=True,
        num_state_slots=info.num_state_slots,
        state_blocks=info.state_blocks,
    )
    pairs = []
    for _ in range(rounds):
        prompt = [generator.randrange(3, VOCABULARY) for _ in range(num_tokens)]
        computed_s, _ = first_token_s(leader, scheduler, prompt)
        found_s, num_found = first_token_s(leader, scheduler, [*prompt[:-1], 3])
        pairs.append((computed_s, found_s, num_found))
    computed, found, nums_found = zip(*pairs, strict=True)
    return min(computed), min(found), min(nums_found)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", default=";".join(MODELS), help="names, with semicolons between them")
    arguments = parser.parse_args()
    table = Table("model", "computed, s", "found, s", "computed / found", "tokens found")
    for name in arguments.models.split(";"):
        computed, found, num_found = measured(MODELS[name], arguments.tokens, arguments.rounds, arguments.threads)
        table.add_row(name, f"{computed:.2f}", f"{found:.3f}", f"{computed / found:.0f}", f"{num_found:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
