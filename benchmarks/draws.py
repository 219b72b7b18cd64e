"""Times of drawing one step's tokens: the native sampler beside PyTorch's, in one run.

    python -m benchmarks.draws [--vocab 151936] [--rows 1 8 32] [--threads 2] [--rounds 10] [--json FILE]

Logits are normal, which is the worst case: no block of the vocabulary can be left out. Rounds of the two alternate;
the table has medians in milliseconds for a whole step of so many rows.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from holdfast.worker.decoder.cpu.sampler import NativeSampler
from holdfast.worker.plan.logits_settings import LogitsSettings
from holdfast.worker.plan.step_plan import DrawParams
from holdfast.worker.sampling.head_output import HeadOutput
from holdfast.worker.sampling.step_sampler import StepSampler, TorchSampler

PLAIN = DrawParams(seed=7, first_output_index=0, temperature=0.8, top_k=0, top_p=1.0)
PENALTIES = LogitsSettings(repetition_penalty=1.2, frequency_penalty=0.3)
KINDS = {
    "temperature": PLAIN,
    "top-p 0.95": replace(PLAIN, top_p=0.95),
    "top-p 0.5": replace(PLAIN, top_p=0.5),
    "top-k 50": replace(PLAIN, top_k=50),
    "top-k 50, top-p 0.95": replace(PLAIN, top_k=50, top_p=0.95),
    "min-p 0.05": replace(PLAIN, min_p=0.05),
    "greedy, logprobs 5": replace(PLAIN, temperature=0.0, num_logprobs=5),
    "top-p 0.95, logprobs 5": replace(PLAIN, top_p=0.95, num_logprobs=5),
    "top-p 0.95, penalties": replace(
        PLAIN, top_p=0.95, logits_settings=PENALTIES, output_token_ids=tuple(range(0, 4000, 8))
    ),
}


def measure(
    samplers: dict[str, StepSampler], logits: torch.Tensor, params: DrawParams, rounds: int
) -> dict[str, float]:
    """Median milliseconds of each sampler for the rows of `logits`."""
    output = HeadOutput(logits, None, logits.view(len(logits), -1, 64).amax(2))
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(rounds + 1):
        draws = [replace(params, seed=row, first_output_index=number) for row in range(len(logits))]
        for name, sampler in samplers.items():
            started = time.perf_counter()
            sampler.sample(output, draws)
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    samplers: dict[str, StepSampler] = {"native": NativeSampler.with_threads(options.threads), "torch": TorchSampler()}
    found = {}
    for rows in options.rows:
        logits = torch.randn(rows, options.vocab, generator=torch.Generator().manual_seed(1)) * 2
        for kind, params in KINDS.items():
            found[f"{rows} x {kind}"] = measure(samplers, logits, params, options.rounds)
    table = Table(title=f"ms to draw a step, vocabulary of {options.vocab}, {options.threads} threads")
    for heading in ("rows x settings", "native", "PyTorch", "ratio"):
        table.add_column(heading, justify="left" if heading.startswith("rows") else "right")
    for kind, ms in found.items():
        table.add_row(kind, f"{ms['native']:.3f}", f"{ms['torch']:.2f}", f"{ms['torch'] / ms['native']:.1f}")
    Console().print(table)
    if options.json:
        machine = {"processor": platform.processor(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "options": vars(options), "ms": found}, default=str))
    samplers["native"].close()


if __name__ == "__main__":
    main()
