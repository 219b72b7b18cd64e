"""Fit of the step cost model to this machine, for the simulator.

    python -m benchmarks.step_model [--model demo] [--out step_model.json] [--rounds 5]

Runs steps of many shapes (one long prompt, many decodes, both at once, short and long contexts), takes the best time of
each, and fits the costs of `worker/scheduler/step_time.py` to them. With the file, `holdfast simulate --replicas N
--step-model step_model.json` answers capacity questions for such replicas.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.batching import load_model
from holdfast.worker.draws import DrawParams
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.step_time import StepCosts, StepShape, shape_of
from holdfast.worker.step_plan import ScheduledSequence, StepPlan, StepRunner

NUM_SEQUENCES = (1, 4, 16, 32)
NUM_TOKENS = (1, 16, 64)
NUM_BEFORE = (0, 128)


def make_plan(info: ModelInfo, num_sequences: int, num_tokens: int, num_before: int) -> StepPlan:
    """A step of equal sequences, each with `num_tokens` to compute after `num_before` that are in the cache."""
    end = num_before + num_tokens
    num_blocks, in_windows = -(-end // info.block_size), 0 if info.window is None else info.window.num_blocks_for(end)
    behind = num_sequences * num_blocks
    sequences = [
        ScheduledSequence(
            sequence_id=number,
            first_position=num_before,
            token_ids=(1,) * num_tokens,
            block_ids=tuple(range(number * num_blocks, (number + 1) * num_blocks)),
            window_block_ids=tuple(range(behind + number * in_windows, behind + (number + 1) * in_windows)),
            draw=DrawParams(SamplingParams(seed=number, temperature=0.0), 0),
            num_draws=1,
        )
        for number in range(num_sequences)
    ]
    return StepPlan(step_id=1, others=tuple(sequences))


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


def fit(steps: list[StepShape], seconds: list[float]) -> StepCosts:
    """Least squares of the relative error, with no negative part: one that comes out below zero is left out."""
    rows = np.array([_features(step) for step in steps]) / np.array(seconds)[:, None]
    kept = list(range(rows.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(rows[:, kept], np.ones(len(steps)), rcond=None)
        if solution.min() >= 0:
            break
        kept.pop(int(solution.argmin()))
    parts = dict(zip(kept, solution.tolist(), strict=True))
    base_s, decode_s, token_s, context_token_s = (parts.get(i, 0.0) for i in range(4))
    return StepCosts(base_s=max(base_s, 1e-6), decode_s=decode_s, token_s=token_s, context_token_s=context_token_s)


def _features(step: StepShape) -> tuple[int, int, int, int]:
    return 1, step.num_decodes, step.num_tokens, step.num_context_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=Path("step_model.json"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runner, info = load_model(options.model, None)
    plans = [make_plan(info, *shape) for shape in shapes(info)]
    seconds = [measure(runner, plan, options.rounds) for plan in plans]
    steps = [shape_of(plan) for plan in plans]
    costs = fit(steps, seconds)
    options.out.write_text(json.dumps(asdict(costs), indent=2) + "\n", encoding="utf-8")
    errors = [abs(costs.predict(step) / took - 1) for step, took in zip(steps, seconds, strict=True)]
    print(f"{info.model} on {platform.processor() or platform.machine()}: {len(plans)} shapes of step")
    print(f"{costs}")
    print(f"relative error: median {statistics.median(errors):.0%}, worst {max(errors):.0%}; written to {options.out}")


if __name__ == "__main__":
    main()
