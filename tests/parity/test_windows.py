"""Layers with a window give their blocks back, and requests are told the same, to the last bit, as if all were kept.

What is kept is compared with Hugging Face in `test_families.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.worker.cache.window_blocks import WindowBlocks, WindowPrefix
from holdfast.worker.config import SpeculationConfig, WorkerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.executors.cpu.cache import BlockForm
from holdfast.worker.models.memory import MemoryEstimator
from holdfast.worker.request import EngineRequest, Priority
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import Sequence
from tests.cluster.simulate.planted_in_replicas import give_back_what_a_window_sees
from tests.parity.families import save_tiny_model
from tests.parity.harness import load, on_ranks, worker_config
from tests.parity.hybrids import Said, request, run_all, scheduler_of, start, told_alone

NUM_NEW = 40
WINDOW = 40
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS = {
    "larger blocks for all": ("gemma3_text", [SLIDING] * 3 + [FULL]),
    "sinks": ("gpt_oss", [SLIDING, FULL]),
    "keys and values that layers share": ("gemma4_text, shared keys", [SLIDING, FULL] * 3),
    "larger blocks for windows": ("cohere2", [FULL, SLIDING, FULL]),
}
TINY = {"max_position_embeddings": 512, "sliding_window": WINDOW}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            family, layers = MODELS[name]
            changes = {**TINY, "layer_types": layers, "num_hidden_layers": len(layers)}
            folders[name] = save_tiny_model(family, tmp_path_factory.mktemp("model"), **changes)
        return folders[name]

    return folder


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(request.param)


def config_of(folder: Path, size: int = 1, **cache: object) -> WorkerConfig:
    config = worker_config(folder, size)
    drafts = config.speculation.model_copy(update={"speculative": "ngram"})
    changed = config.cache.model_copy(update={"num_blocks": 160, "num_state_slots": None, **cache})
    return config.model_copy(update={"speculation": drafts, "cache": changed})


@pytest.fixture(scope="module")
def leader(folder: Path) -> LeaderRunner:
    leader = load(config_of(folder))
    assert leader._runner.info.window is not None
    return leader


@pytest.fixture(scope="module")
def requests(prompts: list[list[int]]) -> list[EngineRequest]:
    """Long ones and short ones, two with a beginning in common."""
    long, short, middle = prompts
    texts = [long * 3, short, middle * 9, (long * 3)[:170] + middle, (long * 3)[:170] + short * 3]
    return [request(str(number), text, NUM_NEW) for number, text in enumerate(texts)]


def kept_whole(config: WorkerConfig) -> LeaderRunner:
    """A replica that gives nothing back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockForm, "sizes", lambda form, block_size, max_model_len: (block_size, None))
        leader = load(config)
    assert leader._runner.info.window is None
    return leader


def alone_on(leader: LeaderRunner, requests: list[EngineRequest]) -> Said:
    return told_alone(leader, requests)


@pytest.fixture(scope="module")
def alone(folder: Path, requests: list[EngineRequest]) -> Said:
    """What each is told by itself, where all is kept, without a cache."""
    return alone_on(kept_whole(config_of(folder)), requests)


class Informed:
    """A proposer that knows what comes. Every fifth token it says another."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def propose(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        first = sequence.num_output_tokens
        coming = self._said[sequence.request.request_id][first : first + num_tokens]
        return tuple(token.token_id ^ (index % 5 == 0) for index, token in enumerate(coming, first))

    def forget(self, sequence: Sequence) -> None:
        """It remembers nothing."""


SETTINGS = {
    "together": {},
    "in chunks of 7": {"max_num_batched_tokens": 8},
    "a token at a time": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "with drafts": {"drafts": 8},
    "without a cache": {"prefix_caching": False},
    "in little memory": {"num_blocks": 40},
}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", SETTINGS)
def test_requests_are_told_the_same_in_any_company(name, leader, requests, alone):
    scheduler = scheduler_of(leader, **SETTINGS[name])
    if "drafts" in name:
        scheduler._drafter._proposer = Informed(alone)
    for _ in range(2):  # and again, from the cache
        assert run_all(scheduler, leader, requests) == alone
    stats = scheduler.stats()
    assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
    assert (
        (stats.num_accepted_tokens > 50) == ("drafts" in name) == (stats.num_draft_tokens > stats.num_accepted_tokens)
    )
    if name == "together":
        assert scheduler.stats().num_prefix_hit_tokens > 300


def test_preempted_they_are_told_the_same(leader, requests, alone):
    """By one of a better class that finds no place."""
    scheduler = scheduler_of(leader, max_num_seqs=2)
    first = start(scheduler, leader, [replace(each, priority=Priority.LOW) for each in requests[2:4]], num_steps=9)
    rest = run_all(scheduler, leader, [requests[0]])
    assert {name: first.get(name, []) + said for name, said in rest.items()} == {
        name: alone[name] for name in ("0", "2", "3")
    }
    assert scheduler.stats().num_preemptions > 0


def test_after_each_of_its_tokens_a_request_goes_on_elsewhere(leader, requests, alone):
    whole = requests[0]
    said = alone[whole.request_id]
    for count in (1, NUM_NEW - 1):
        tokens = tuple(token.token_id for token in said[:count])
        rest = run_all(scheduler_of(leader), leader, [replace(whole, output_token_ids=tokens)])
        assert rest[whole.request_id] == said[count:]


def test_forks_are_told_what_they_are_told_alone(leader, requests):
    siblings = [
        replace(
            one, sampling_params=replace(one.sampling_params, seed=number), group_id="group", request_id=str(number)
        )
        for number, one in enumerate([requests[2]] * 3)
    ]
    apart = alone_on(leader, [replace(one, group_id="") for one in siblings])
    scheduler = scheduler_of(leader, prefix_caching=False)
    assert run_all(scheduler, leader, siblings) == apart
    assert scheduler.stats().num_forked_tokens > 0


@pytest.mark.parametrize("name", ["larger blocks for all", "larger blocks for windows"])
def test_with_a_draft_model_they_are_told_the_same(name, folder_of, requests):
    """It is the model itself, and keeps all of its own keys and values."""
    config = config_of(folder_of(name))
    expected = alone_on(kept_whole(config), requests)
    drafts = SpeculationConfig(speculative="draft", draft_model=config.model.model)
    leader = load(config.model_copy(update={"speculation": drafts}))
    assert leader._runner.info.window is not None
    for values in ({}, {"max_num_batched_tokens": 48}, {"num_blocks": 40}):
        scheduler = scheduler_of(leader, speculation=drafts, max_num_seqs=3, **values)
        assert [run_all(scheduler, leader, requests) for _ in range(2)] == [expected] * 2
        assert scheduler.stats().num_accepted_tokens > 20


def test_ranks_give_back_alike(folder, requests, alone):
    def twice(leader: LeaderRunner) -> list[Said]:
        assert leader._runner.info.window is not None
        scheduler = scheduler_of(leader, 8)
        return [run_all(scheduler, leader, requests) for _ in range(2)]

    assert on_ranks(config_of(folder, 2), twice) == [alone, alone]


def test_in_eight_bits_they_are_told_what_they_are_where_all_is_kept(folder_of, requests):
    config = config_of(folder_of("larger blocks for all"), kv_cache_dtype="int8")
    expected = alone_on(kept_whole(config), requests)
    leader = load(config)
    scheduler = scheduler_of(leader, num_blocks=60)
    assert [run_all(scheduler, leader, requests) for _ in range(2)] == [expected, expected]


def test_the_estimate_is_what_is_loaded(folder, leader):
    needs, info = MemoryEstimator(config_of(folder)), leader._runner.info
    assert (needs.window, needs.block_size) == (info.window, info.block_size)
    assert needs.kv_bytes_per_token == info.kv_bytes_per_token
    cache = leader._runner.backend.executor._cache
    assert len(cache.ahead._layers or [cache._layers[0].memory]) == 1
    assert cache._layers[0].memory.block_bytes == needs.block_bytes
    longest = needs.max_model_len
    assert needs.num_sequences(10 * needs.block_bytes * (-(-longest // info.block_size) + 12), longest) >= 10


# --- mistakes, planted ---


def find_other_blocks_than_those_of_the_window(patch: pytest.MonkeyPatch) -> None:
    found = WindowBlocks.find

    def careless(blocks: WindowBlocks, *arguments) -> tuple[int, WindowPrefix]:
        end, prefix = found(blocks, *arguments)
        return end, WindowPrefix(prefix.first, prefix.block_ids[::-1])

    patch.setattr(WindowBlocks, "find", careless)


@pytest.mark.parametrize(
    ("mistake", "prefix_caching"),
    [(give_back_what_a_window_sees, False), (find_other_blocks_than_those_of_the_window, True)],
)
def test_a_planted_mistake_shows(mistake, prefix_caching, folder_of, requests, monkeypatch):
    leader = load(config_of(folder_of("larger blocks for all")))
    expected = alone_on(leader, requests)
    mistake(monkeypatch)
    monkeypatch.setattr(Scheduler, "check_integrity", lambda scheduler: None)  # which would show it sooner
    scheduler = scheduler_of(leader, prefix_caching=prefix_caching)
    assert [run_all(scheduler, leader, requests) for _ in range(2)] != [expected, expected]
