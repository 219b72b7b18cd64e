"""How long a step of a model takes on this machine, fitted for the simulator.

    python -m benchmarks.step_model [--model demo] [--out step_model.json] [--rounds 5]

Runs steps of many shapes (one long prompt, many decodes, both at once, short and long contexts), takes the best time of
each, and fits seconds = base + per_token * tokens + per_context_token * context + per_sequence * sequences.
`holdfast simulate --replicas N --step-model step_model.json` then answers capacity questions for such replicas.
"""

import argparse
import itertools
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.batching import load_model
from cluster.simulate.step_model import StepModel
from worker.model_info import ModelInfo
from worker.plan import DrawParams, ScheduledSequence, StepPlan, StepRunner

NUM_SEQUENCES = (1, 4, 16, 32)
NUM_TOKENS = (1, 16, 64)
NUM_BEFORE = (0, 128)


def make_plan(info: ModelInfo, num_sequences: int, num_tokens: int, num_before: int) -> StepPlan:
    """A step of equal sequences, each with `num_tokens` to compute after `num_before` that are in the cache."""
    num_blocks = -(-(num_before + num_tokens) // info.block_size)
    sequences = [
        ScheduledSequence(
            sequence_id=number,
            first_position=num_before,
            token_ids=(1,) * num_tokens,
            block_ids=tuple(range(number * num_blocks, (number + 1) * num_blocks)),
            draw=DrawParams(seed=number, first_output_index=0, temperature=0.0, top_k=0, top_p=1.0),
            num_draws=1,
        )
        for number in range(num_sequences)
    ]
    return StepPlan(step_id=1, sequences=tuple(sequences))


def shapes(info: ModelInfo) -> list[tuple[int, int, int]]:
    """(sequences, tokens each, context before each) that fit the model and its cache."""
    candidates = itertools.product(NUM_SEQUENCES, NUM_TOKENS, NUM_BEFORE)
    num_slots = info.num_blocks * info.block_size
    return [
        (num_sequences, num_tokens, num_before)
        for num_sequences, num_tokens, num_before in candidates
        if num_before + num_tokens <= info.max_model_len
        and num_sequences * (num_before + num_tokens + info.block_size) <= num_slots
        and num_sequences * num_tokens <= 512
    ]


def measure(runner: StepRunner, plan: StepPlan, rounds: int) -> float:
    """Seconds of a step: the best of some, because whatever else runs on a machine only ever makes it slower."""
    times = []
    for _ in range(rounds + 1):
        started_s = time.perf_counter()
        runner.run(plan)
        times.append(time.perf_counter() - started_s)
    return min(times)


def fit(plans: list[StepPlan], seconds: list[float]) -> StepModel:
    """Least squares of the relative error, with no negative part: one that comes out below zero is left out."""
    rows = np.array([_features(plan) for plan in plans]) / np.array(seconds)[:, None]
    kept = list(range(rows.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(rows[:, kept], np.ones(len(plans)), rcond=None)
        if solution.min() >= 0:
            break
        kept.pop(int(solution.argmin()))
    parts = dict(zip(kept, solution.tolist(), strict=True))
    base_s, per_token_s, per_context_token_s, per_sequence_s = (parts.get(i, 0.0) for i in range(4))
    return StepModel(
        base_s=max(base_s, 1e-6),
        per_token_s=per_token_s,
        per_context_token_s=per_context_token_s,
        per_sequence_s=per_sequence_s,
    )


def _features(plan: StepPlan) -> tuple[int, int, int, int]:
    num_context = sum(item.first_position + len(item.token_ids) for item in plan.sequences)
    return 1, plan.num_tokens, num_context, len(plan.sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=Path("step_model.json"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runner, info = load_model(options.model, None)
    plans = [make_plan(info, *shape) for shape in shapes(info)]
    seconds = [measure(runner, plan, options.rounds) for plan in plans]
    model = fit(plans, seconds)
    model.write(options.out)
    errors = [abs(model.seconds(plan) / took - 1) for plan, took in zip(plans, seconds, strict=True)]
    print(f"{info.name} on {platform.processor() or platform.machine()}: {len(plans)} shapes of step")
    print(f"{model}")
    print(f"relative error: median {statistics.median(errors):.0%}, worst {max(errors):.0%}; written to {options.out}")


if __name__ == "__main__":
    main()
