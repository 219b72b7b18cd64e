"""Every kind of model says the same, to the last bit, in every situation: one table of models by situations.

`make test` has one model in all of them; the whole table is slow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

from holdfast.worker.config import SpeculationConfig, WorkerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.executors.cpu import executor
from holdfast.worker.executors.cpu.library import class_of, load_library, runnable_classes
from holdfast.worker.request import EngineRequest, Priority
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.parity.families import save_tiny_model
from tests.parity.harness import hugging_face, load, on_ranks, worker_config
from tests.parity.hybrids import Said, request, run_all, save_hybrid, scheduler_of, start, told_alone
from tests.parity.test_next_token import Parts, add_layer
from tests.parity.test_windows import Informed

NUM_NEW = 14
SLIDING, FULL = "sliding_attention", "full_attention"


def windowed(family: str, *layers: str) -> Callable[[Path], Path]:
    changes = {"max_position_embeddings": 512, "sliding_window": 40, "num_hidden_layers": len(layers)}
    return lambda folder: save_tiny_model(family, folder, layer_types=list(layers), **changes)


def hybrid(pattern: str) -> Callable[[Path], Path]:
    return lambda folder: save_hybrid(folder, pattern)


def family(name: str) -> Callable[[Path], Path]:
    return lambda folder: save_tiny_model(name, folder)


MODELS: dict[str, Callable[[Path], Path]] = {
    "LFM2": hybrid("attention last"),
    "LFM2, a mixture": hybrid("conv, mixture"),
    "Qwen3.5": hybrid("dense"),
    "Qwen3.5, a mixture": hybrid("mixture"),
    "Qwen3-Next": hybrid("by key heads, mixture"),
    "Granite 4 H": hybrid("granite, mixture"),
    "Nemotron 3": hybrid("nemotron"),
    "Bamba": hybrid("bamba"),
    "Falcon-H1": hybrid("falcon"),
    "Mamba2": hybrid("Mamba2 alone"),
    "Kimi Linear": hybrid("kimi"),
    "DeepSeek V2": family("deepseek_v2"),
    "DeepSeek V3": family("deepseek_v3"),
    "GLM-4.7-Flash": family("glm4_moe_lite"),
    "Gemma 3": windowed("gemma3_text", SLIDING, SLIDING, SLIDING, FULL),
    "Gemma 4 E2B": family("gemma4_text, shared keys"),
    "gpt-oss": windowed("gpt_oss", SLIDING, FULL),
    "Cohere 2": windowed("cohere2", FULL, SLIDING, FULL),
}
IN_MAKE_TEST = "LFM2"
WITH_NEXT_TOKEN = {"Qwen3.5", "Qwen3.5, a mixture", "Qwen3-Next", "DeepSeek V3", "GLM-4.7-Flash"}
"""Models whose checkpoints have a layer that drafts, and whose families read it."""


@dataclass
class Case:
    """A model, its requests, and what they are told alone."""

    name: str
    folder: Path
    requests: Sequence[EngineRequest]

    def config(self, size: int = 1, speculative: str = "ngram") -> WorkerConfig:
        worker = worker_config(self.folder, size)
        cache = worker.cache.model_copy(update={"num_blocks": 160})
        return worker.model_copy(update={"cache": cache, "speculation": SpeculationConfig(speculative=speculative)})

    @cached_property
    def leader(self) -> LeaderRunner:
        return load(self.config())

    @cached_property
    def alone(self) -> Said:
        return told_alone(self.leader, self.requests)

    def scheduler(self, drafts: int = 0, **values: object) -> Scheduler:
        """Of drafts, four in five are right."""
        scheduler = scheduler_of(self.leader, drafts, **values)
        if drafts:
            scheduler._drafter._proposer = Informed(self.alone)
        return scheduler

    def run(self, scheduler: Scheduler) -> Said:
        return run_all(scheduler, self.leader, self.requests)


def batched(case: Case) -> None:
    assert case.run(case.scheduler()) == case.alone


def in_chunks(size: int) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        values = {"max_num_seqs": 1} if size == 1 else {}
        assert case.run(case.scheduler(max_num_batched_tokens=size, **values)) == case.alone

    return check


def cached(case: Case) -> None:
    scheduler = case.scheduler()
    assert [case.run(scheduler) for _ in range(2)] == [case.alone] * 2
    assert scheduler.stats().num_prefix_hit_tokens > 64


def in_one_memory(case: Case) -> None:
    """A state takes the place of 9 blocks, and blocks and snapshots make way for each other."""
    if not case.leader._runner.info.num_state_slots:
        pytest.skip("the model keeps no states")
    scheduler = case.scheduler(8, state_blocks=9, num_blocks=48)
    assert [case.run(scheduler) for _ in range(2)] == [case.alone] * 2


def drafted(case: Case) -> None:
    scheduler = case.scheduler(8)
    assert case.run(scheduler) == case.alone
    stats = scheduler.stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 20


def by_next_token_layer(case: Case) -> None:
    config = case.config(speculative="mtp")
    leader = load(config)
    scheduler = scheduler_of(leader, speculation=config.speculation)
    assert [run_all(scheduler, leader, case.requests) for _ in range(2)] == [case.alone] * 2
    assert scheduler.stats().num_draft_tokens > 0


def preempted(case: Case) -> None:
    """By one of a better class that finds no place."""
    scheduler = case.scheduler(8, max_num_seqs=2)
    low = [replace(each, priority=Priority.LOW) for each in case.requests[1:3]]
    first = start(scheduler, case.leader, low, num_steps=2)
    rest = run_all(scheduler, case.leader, case.requests[:1])
    said = {name: first.get(name, []) + more for name, more in rest.items()}
    assert said == {name: case.alone[name] for name in said}
    assert len(said) == 3
    assert scheduler.stats().num_preemptions > 0


def forked(case: Case) -> None:
    one = case.requests[0]
    seeds = [replace(one.sampling_params, seed=number) for number in range(3)]
    apart = [replace(one, sampling_params=seed, request_id=str(number)) for number, seed in enumerate(seeds)]
    scheduler = case.scheduler(prefix_caching=False)
    together = run_all(scheduler, case.leader, [replace(each, group_id="group") for each in apart])
    assert together == told_alone(case.leader, apart)
    assert scheduler.stats().num_forked_tokens > 0


def as_beams(case: Case) -> None:
    """Candidates of three beams, round by round, as a search asks for them: from the cache, beside each other."""
    scheduler, beams = case.scheduler(), [case.requests[0].prompt_token_ids]
    for _ in range(4):
        drawn = [request(str(number), beam, 1) for number, beam in enumerate(beams)]
        asked = [
            replace(each, sampling_params=replace(each.sampling_params, temperature=0.0, logprobs=3)) for each in drawn
        ]
        told = run_all(scheduler, case.leader, asked)
        assert told == told_alone(case.leader, asked)
        likeliest: dict[tuple[int, ...], float] = {}
        for each in asked:
            (first,) = told[each.request_id]
            for token, logprob in first.top:
                likeliest[(*each.prompt_token_ids, token)] = logprob
        beams = sorted(likeliest, key=lambda beam: -likeliest[beam])[:3]


def resumed(case: Case) -> None:
    whole = case.requests[0]
    said = case.alone[whole.request_id]
    for count in (1, 5, NUM_NEW - 1):
        tokens = tuple(token.token_id for token in said[:count])
        rest = run_all(case.scheduler(), case.leader, [replace(whole, output_token_ids=tokens)])
        assert rest[whole.request_id] == said[count:]


def on_so_many_ranks(size: int) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        alone = case.alone

        def twice(leader: LeaderRunner) -> list[Said]:
            scheduler = case.scheduler(8)
            return [run_all(scheduler, leader, case.requests) for _ in range(2)]

        assert on_ranks(case.config(size), twice) == [alone] * 2

    return check


def in_other_instructions(case: Case) -> None:
    for name in runnable_classes()[1:]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "load_library", lambda given, name=name: load_library(given or name))
            leader = load(case.config())
        assert class_of(leader._runner.backend.executor._library) == name
        assert run_all(case.scheduler(8), leader, case.requests) == case.alone, name


SITUATIONS: dict[str, Callable[[Case], None]] = {
    "batched": batched,
    "in chunks of 1": in_chunks(1),
    "in chunks of 7": in_chunks(7),
    "in chunks of 64": in_chunks(64),
    "cached": cached,
    "in one memory": in_one_memory,
    "drafted": drafted,
    "MTP": by_next_token_layer,
    "preempted": preempted,
    "forked": forked,
    "beams": as_beams,
    "resumed": resumed,
    "2 ranks": on_so_many_ranks(2),
    "4 ranks": on_so_many_ranks(4),
    "other instructions": in_other_instructions,
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == IN_MAKE_TEST else [pytest.mark.slow]) for name in MODELS],
)
def model(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def case(model: str, tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> Case:
    """Two of its requests have a beginning in common, and one repeats itself, so that it can be drafted."""
    folder = MODELS[model](tmp_path_factory.mktemp("model"))
    if model in WITH_NEXT_TOKEN:
        reference, is_behind = hugging_face(folder), not model.startswith("Qwen")
        add_layer(folder, Parts(reference, is_behind), is_behind, reference.config.num_hidden_layers)
    long, short, middle = prompts
    texts = [long, middle, short * 6, long[:66] + middle]
    return Case(model, folder, [request(str(number), text, NUM_NEW) for number, text in enumerate(texts)])


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_request_is_told_the_same_in_every_situation(situation: str, case: Case):
    if situation == "MTP" and case.name not in WITH_NEXT_TOKEN:
        pytest.skip("the family's checkpoints have no next-token layer")
    SITUATIONS[situation](case)
