"""CPU time of drawing one step's tokens by the native sampler, and its share of the step.

    python -m benchmarks.draws [--vocab 151936] [--rows 1 8 32] [--threads 2] [--rounds 30] [--spread 2]
        [--kinds WORD ...] [--step-of MODEL] [--against LIBRARY] [--torch] [--json FILE]

Logits are normal with a standard deviation of `--spread`. 2 is a bad case: next to no block of the vocabulary can be
left out. The sampler gets the head's own best of each 64 logits, and where log-probabilities are asked for its sums of
exponentials too. `--step-of`: steps of a model (`peers/models.py`) are run in the same rounds, with and without those
sums, draws are from its vocabulary, and the table has shares of the step. `--against`: beside it another version of the
native library; `--torch`: PyTorch's sampler, which takes seconds. Kinds and samplers alternate. The table has the least
and the median CPU time of all threads, in milliseconds for a step of so many rows, with what Python does for it.
"""

import argparse
import json
import platform
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decoder_steps import Kind, Timed, load, make_batch
from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.draws import DrawParams, LogitsSettings
from holdfast.worker.executors.cpu import library
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.step_sampler import HeadOutput, StepSampler
from holdfast.worker.sampling_params import SamplingParams

PLAIN = DrawParams(SamplingParams(seed=7, temperature=0.8), 0)


def changed(
    params: DrawParams,
    logits_settings: LogitsSettings | None = None,
    output_token_ids: "tuple[int, ...] | array[int]" = (),
    **sampling: object,
) -> DrawParams:
    """The same draw but for these."""
    return DrawParams(params.sampling.with_changes(**sampling), 0, logits_settings, output_token_ids)


NUCLEUS = changed(PLAIN, top_p=0.95)
OUTPUTS = array("q", range(0, 4000, 8))
LONG_OUTPUTS = array("q", range(3000))
PENALTIES = LogitsSettings(repetition_penalty=1.2, frequency_penalty=0.3)
LONG = LogitsSettings(repetition_penalty=1.2, presence_penalty=0.3, prompt_token_ids=array("q", range(1, 60_000, 20)))
EDITED = LogitsSettings(
    min_tokens=9_999, end_token_ids=(0, 7), bad_words=((5,), (9,)), logit_bias=tuple((i * 500, 1.5) for i in range(300))
)
KINDS = {
    "greedy, logprobs 0": changed(PLAIN, temperature=0.0, logprobs=0),
    "greedy, logprobs 5": changed(PLAIN, temperature=0.0, logprobs=5),
    "greedy, logprobs 20": changed(PLAIN, temperature=0.0, logprobs=20),
    "greedy, penalties": changed(PLAIN, temperature=0.0, logits_settings=PENALTIES, output_token_ids=OUTPUTS),
    "temperature": PLAIN,
    "temperature 2": changed(PLAIN, temperature=2.0),
    "top-p 0.95": NUCLEUS,
    "top-p 0.5": changed(PLAIN, top_p=0.5),
    "top-p 0.1": changed(PLAIN, top_p=0.1),
    "temperature 2, top-p 0.1": changed(PLAIN, temperature=2.0, top_p=0.1),
    "top-k 50": changed(PLAIN, top_k=50),
    "top-k 50, top-p 0.95": changed(NUCLEUS, top_k=50),
    "top-k 20000": changed(PLAIN, top_k=20_000),
    "min-p 0.05": changed(PLAIN, min_p=0.05),
    "min-p 0.05, top-p 0.5": changed(PLAIN, min_p=0.05, top_p=0.5),
    "top-p 0.95, logprobs 5": changed(NUCLEUS, logprobs=5),
    "top-p 0.95, logprobs 20": changed(NUCLEUS, logprobs=20),
    "temperature 2, logprobs 20": changed(PLAIN, temperature=2.0, logprobs=20),
    "top-p 0.95, penalties": changed(NUCLEUS, logits_settings=PENALTIES, output_token_ids=OUTPUTS),
    "top-p 0.95, penalties on 6000 tokens": changed(NUCLEUS, logits_settings=LONG, output_token_ids=LONG_OUTPUTS),
    "top-p 0.95, bias of 300 and bans": changed(NUCLEUS, logits_settings=EDITED),
    "top-p 0.95, 1000 allowed": changed(
        NUCLEUS, logits_settings=LogitsSettings(allowed_token_ids=array("q", range(0, 100_000, 100)))
    ),
    "top-p 0.95, mask": changed(NUCLEUS, logits_settings=LogitsSettings(grammar="x")),
    "all at once": changed(
        PLAIN,
        temperature=2.0,
        top_k=20_000,
        top_p=0.1,
        min_p=1e-6,
        logits_settings=replace(
            LONG, grammar="x", min_tokens=9_999, end_token_ids=(0, 7), logit_bias=EDITED.logit_bias
        ),
        output_token_ids=LONG_OUTPUTS,
        logprobs=20,
    ),
    "top-p 0.95, penalties, logprobs 20": changed(
        NUCLEUS, logits_settings=PENALTIES, output_token_ids=OUTPUTS, logprobs=20
    ),
}


Ready = Callable[[], object]
"""One round of what is measured, with all that is not to be measured done."""


@dataclass(slots=True)
class Step:
    """A model's decodes of so many sequences, as the engine runs them before draws."""

    timed: Timed
    rows: int
    with_masses: bool

    def ready(self, number: int) -> Ready:
        batch = make_batch(Kind("decode", self.rows, 160, 1), self.timed.loaded.info.block_size)
        batch = replace(batch, with_masses=self.with_masses)
        return lambda: self.timed.loaded.backend.run(batch, with_logits=True)


@dataclass(slots=True)
class Draws:
    """One sampler's draws of one kind from all rows, of another output position in each round."""

    sampler: StepSampler
    output: HeadOutput
    params: DrawParams
    mask: bytes | None

    def ready(self, number: int) -> Ready:
        assert self.output.logits is not None, "rows of logits are drawn from"
        rows = range(self.output.logits.shape[0])
        draws = [
            replace(self.params, sampling=self.params.sampling.with_changes(seed=row), first_output_index=number)
            for row in rows
        ]
        masks = dict.fromkeys(rows, self.mask) if self.mask else None
        return lambda: self.sampler.sample(self.output, draws, masks)


@dataclass(slots=True)
class Measured:
    what: Step | Draws
    cpu_ms: list[float] = field(default_factory=list)

    def round(self, number: int) -> None:
        run = self.what.ready(number)
        cpu = time.process_time()
        run()
        if number:  # the first round warms up
            self.cpu_ms.append((time.process_time() - cpu) * 1e3)


def head_output(rows: int, vocab: int, spread: float) -> HeadOutput:
    """Normal logits as a head gives them."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * spread
    filled = torch.nn.functional.pad(logits, (0, -vocab % 64), value=float("-inf")).view(rows, -1, 64)
    best = filled.amax(2)
    return HeadOutput(logits, None, best, (filled - best[..., None]).exp().sum(2))


def other_sampler(path: Path, threads: int) -> NativeSampler:
    """A sampler of another library, which is loaded as it is, whatever sources it was made from."""
    library.load_library.cache_clear()
    with patch.object(library, "path_of", lambda name: path):
        sampler = OwnPoolSampler.with_threads(threads)
    library.load_library.cache_clear()
    return sampler


def measure(
    samplers: dict[str, StepSampler], kinds: dict[str, DrawParams], output: HeadOutput, step: Timed | None, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """CPU milliseconds of all rounds, by kind and sampler; of steps under names of their own."""
    assert output.logits is not None, "rows of logits are drawn from"
    rows, vocab = output.logits.shape
    mask = bytes([0b01010101]) * (vocab // 8)
    measured: dict[tuple[str, str], Measured] = {}
    if step:
        for name, with_masses in (("step", False), ("step with sums for log-probabilities", True)):
            measured[name, "native"] = Measured(Step(step, rows, with_masses))
    for kind, params in kinds.items():
        given = replace(output, block_mass=None) if params.num_logprobs is None else output
        for name, sampler in samplers.items():
            has_mask = params.logits_settings is not None and bool(params.logits_settings.grammar)
            measured[kind, name] = Measured(Draws(sampler, given, params, mask if has_mask else None))
    for number in range(rounds + 1):
        for one in measured.values():
            one.round(number)
    found: dict[str, dict[str, list[float]]] = {}
    for (kind, name), one in measured.items():
        found.setdefault(kind, {})[name] = one.cpu_ms
    return found


def show(title: str, found: dict[str, dict[str, list[float]]], names: list[str]) -> None:
    table = Table("settings", *(f"{name}, {what}" for name in names for what in ("least", "median")), title=title)
    table.add_column("share of a step")
    steps = found.get("step", {}).get("native")
    for kind, ms in found.items():
        cells = [f"{of(ms[name]):.3f}" if name in ms else "" for name in names for of in (min, statistics.median)]
        share = f"{statistics.median(ms['native']) / statistics.median(steps):.1%}" if steps else ""
        table.add_row(kind, *cells, share)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--spread", type=float, default=2.0, help="standard deviation of the logits")
    parser.add_argument("--kinds", nargs="+", help="only settings whose name has one of these words")
    parser.add_argument("--step-of", help="folder of a model whose steps are measured as well")
    parser.add_argument("--against", type=Path, help="a library of the same instruction class, to time as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    step = load("native", options.step_of) if options.step_of else None
    vocab = step.loaded.info.vocab_size if step else options.vocab
    samplers: dict[str, StepSampler] = {"native": OwnPoolSampler.with_threads(options.threads)}
    if options.against:
        samplers["against"] = other_sampler(options.against, options.threads)
    kinds = {k: v for k, v in KINDS.items() if not options.kinds or any(word in k for word in options.kinds)}
    found = {}
    for rows in options.rows:
        output = head_output(rows, vocab, options.spread)
        found[rows] = measure(samplers, kinds, output, step, options.rounds)
        show(f"CPU ms, {rows} rows of {vocab} logits, {options.threads} threads", found[rows], list(samplers))
    if options.json:
        machine = {"processor": platform.processor(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "options": vars(options), "ms": found}, default=str))
    for sampler in samplers.values():
        sampler.close()


if __name__ == "__main__":
    main()
