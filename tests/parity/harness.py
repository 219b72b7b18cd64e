"""Runs a tiny model through the real loader and runner, step by step, and Hugging Face's own beside it."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.free_port import pick_port
from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner, follow
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.executors.tensor_parallel import DistributedGroup, SingleRank
from holdfast.worker.replica.rank import run_rank
from holdfast.worker.request import EngineRequest, TokenLogprob
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import ScheduledSequence, StepPlan
from tests.draw_params import draw_params
from tests.fake_group import run_ranks

T = TypeVar("T")

BLOCK_SIZE = 16
"""The smallest that a CPU's cache can have, since mistakes are made at the borders of blocks."""
NUM_BLOCKS = 64
NUM_SLOTS = 8
"""Of models that keep states."""
GREEDY = draw_params(seed=0, first_output_index=0, temperature=0.0, top_k=0, top_p=1.0)


def worker_config(folder: Path, size: int = 1, *, executor: str = "auto", **model: Any) -> WorkerConfig:
    """`auto`: the native backend, where the family is stated."""
    return WorkerConfig(
        model=ModelConfig(model=str(folder), device="cpu", executor=executor, **model),
        parallel=ParallelConfig(tensor_parallel_size=size),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_state_slots=NUM_SLOTS),
    )


def load(config: WorkerConfig) -> LeaderRunner:
    """A replica of one rank."""
    group = SingleRank()
    return LeaderRunner(ModelRunner.load(config, group, device=torch.device("cpu")), group)


def on_ranks(config: WorkerConfig, work: Callable[[LeaderRunner], T]) -> T:
    """What `work` returns on the leader of a replica whose ranks are threads. The others follow."""

    def run(group: Any) -> T | None:
        runner = ModelRunner.load(config, group, device=torch.device("cpu"))
        if group.rank > 0:
            return follow(runner, group)
        leader = LeaderRunner(runner, group)
        try:
            return work(leader)
        finally:
            leader.close()

    return run_ranks(config.parallel.tensor_parallel_size, run)[0]


@contextmanager
def in_processes(config: WorkerConfig) -> Iterator[LeaderRunner]:
    """The leader of a replica of two ranks, the other of which is a process. That one ends by itself."""
    rendezvous = Rendezvous.at("127.0.0.1", pick_port())
    other = multiprocessing.get_context("spawn").Process(target=run_rank, args=(config, 1, rendezvous))
    other.start()
    group = DistributedGroup(0, 2, rendezvous, start_timeout_s=60)
    try:
        leader = LeaderRunner(ModelRunner.load(config, group, device=torch.device("cpu")), group)
        leader.keep_alive()
        yield leader
        leader.close()
    finally:
        group.close()
        other.join(30)
        other.kill()
    assert other.exitcode == 0


class Sequences:
    """Sequences with block tables drawn at random from the whole cache."""

    def __init__(self, leader: LeaderRunner, prompts: Sequence[Sequence[int]], num_new: int = 0) -> None:
        self.tokens = [list(prompt) for prompt in prompts]
        self._block_size = leader._runner.info.block_size
        self._has_states = leader._runner.info.num_state_slots > 0
        shuffled = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
        self._window = leader._runner.info.window
        lengths = [len(prompt) + num_new for prompt in prompts]
        needs = [-(-length // self._block_size) for length in lengths]
        in_windows = [0 if self._window is None else self._window.num_blocks_for(length) for length in lengths]
        assert sum(needs) + sum(in_windows) <= NUM_BLOCKS
        self._tables = [[shuffled.pop() for _ in range(need)] for need in needs]
        self._window_tables = [[shuffled.pop() for _ in range(need)] for need in in_windows]

    def scheduled(self, number: int, start: int, count: int, num_draws: int) -> ScheduledSequence:
        return ScheduledSequence(
            sequence_id=number,
            first_position=start,
            token_ids=tuple(self.tokens[number][start : start + count]),
            block_ids=tuple(self._tables[number][: -(-(start + count) // self._block_size)]),
            window_block_ids=tuple(self._window_tables[number][: self._num_window_blocks(start + count)]),
            draw=GREEDY if num_draws else None,
            num_draws=num_draws,
            state_slot=number if self._has_states else None,
        )

    def _num_window_blocks(self, num_tokens: int) -> int:
        return 0 if self._window is None else self._window.num_blocks_for(num_tokens)


def logits_in_chunks(leader: LeaderRunner, prompts: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
    """All logits of each prompt, all prompts in each step, `chunk` tokens of each at a time."""
    sequences = Sequences(leader, prompts)
    rows: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        counts = [max(0, min(chunk, len(prompt) - start)) for prompt in prompts]
        spans = [(number, count) for number, count in enumerate(counts) if count]
        plan = StepPlan(step_id=0, others=tuple(sequences.scheduled(n, start, c, c) for n, c in spans))
        logits = torch.from_numpy(leader.logits(plan))
        for (number, _), part in zip(spans, logits.split([c for _, c in spans]), strict=True):
            rows[number].append(part)
    return [torch.cat(parts) for parts in rows]


def greedy_tokens(leader: LeaderRunner, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """What each prompt continues with, all prompts decoding together."""
    sequences = Sequences(leader, prompts, num_new)
    starts = [0] * len(prompts)
    for _ in range(num_new):
        numbers = range(len(prompts))
        steps = [sequences.scheduled(n, starts[n], len(sequences.tokens[n]) - starts[n], 1) for n in numbers]
        result = leader.run(StepPlan(step_id=0, others=tuple(steps)))
        for number, drawn in enumerate(result.token_ids):
            starts[number] = len(sequences.tokens[number])
            sequences.tokens[number] += drawn
    return [tokens[len(prompt) :] for tokens, prompt in zip(sequences.tokens, prompts, strict=True)]


def is_run_by(leader: LeaderRunner, executor: str) -> bool:
    """Whether `native` or `hf` runs the model's layers."""
    layers, _, _ = leader._runner.info.executor.partition("+")  # what draws has a name of its own
    return layers.partition("-")[0] == executor


def hugging_face(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def relative_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference, in relation to the largest logit."""
    return largest_difference(ours, theirs) / max(float(rows.abs().max()) for rows in theirs)


def reference_logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Hugging Face's logits, one sequence at a time."""
    with torch.inference_mode():
        return [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]


def likeliest_tokens(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Hugging Face's likeliest token after the prompt and each of the tokens but the last. They are the tokens if, and
    only if, the tokens are what its `generate` goes on with.
    """
    (logits,) = reference_logits(model, [[*prompt, *tokens[:-1]]])
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def logprobs_of(
    scheduler: Scheduler, leader: LeaderRunner, requests: Sequence[EngineRequest]
) -> dict[str, list[TokenLogprob]]:
    """What requests that run together are told, whose bits tell more than the tokens."""
    said: dict[str, list[TokenLogprob]] = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        for delta in scheduler.commit(plan, leader.run(plan)):
            said[str(delta.attempt)] += delta.logprobs
        scheduler.check_integrity()
    return said
