"""What prefix-aware routing saves: the dispatch core in front of two schedulers, without wires."""

import random

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.prefix_index import PromptPrefix
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.events import SendSubmit
from holdfast.worker.cache.prefix_cache import CacheFeed
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_update import CacheChanges, StepUpdate
from tests.pseudo_model import PseudoRunner
from tests.router.core import Core, LetterText, delta, facts, load, sent

BLOCK_SIZE, NUM_BLOCKS, PREFIX_LEN = 16, 40, 512  # a replica has room for one prefix


class Replica:
    """A scheduler, a pseudo-model, and what the link would say of them."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=1000,
            eos_token_ids=frozenset(),
        )
        self.runner = PseudoRunner(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler.prefix_cache.take_events()
        self.feed = CacheFeed(())

    def run(self, action: SendSubmit) -> list[StepUpdate]:
        self.scheduler.add(action.request, attempt=action.attempt)
        said = []
        while (plan := self.scheduler.plan()) is not None:
            deltas = self.scheduler.commit(plan, self.runner.run(plan))
            self.feed.note(self.scheduler.prefix_cache.take_events())
            said.append(StepUpdate(load=self.scheduler.load(), deltas=deltas, cache=self.feed.take()))
        return said


def num_hit_tokens(routing_policy: str, num_requests: int = 40) -> int:
    """Prompts of two long prefixes in turn, one after the other; how many of their tokens were cached."""
    replicas = {"r0": Replica(), "r1": Replica()}
    config = RouterConfig(routing_policy=routing_policy)
    dispatch = Dispatch(config, LimitsConfig(), random.Random(1).randrange)
    for replica_id, replica in replicas.items():
        dispatch.replica_up(facts(replica_id, block_size=BLOCK_SIZE), replica.scheduler.load(), 0.0)
    for number in range(num_requests):
        prompt = (1 + number % 2,) * PREFIX_LEN + (number,) * 8
        params = SamplingParams(seed=1, max_tokens=2)
        request = EngineRequest(request_id=f"{number}", prompt_token_ids=prompt, sampling_params=params)
        state = RequestState(request=request, model="m", text=LetterText(), deadline=9.0)
        submission = sent(dispatch.submit(state, 0.0))
        for news in replicas[submission.replica_id].run(submission):
            dispatch.step(submission.replica_id, news, 0.0)
    assert dispatch.num_open == 0
    return sum(replica.scheduler.stats().num_prefix_hit_tokens for replica in replicas.values())


def test_two_prefixes_settle_on_two_replicas_and_power_of_two_choices_mixes_them():
    aware, blind = num_hit_tokens("prefix_aware"), num_hit_tokens("power_of_two")
    assert aware >= 36 * PREFIX_LEN, "each is computed once, and again until the two have met different replicas"
    assert blind <= 24 * PREFIX_LEN, "each replica has the right one about every second time"


# --- by hand ---


@pytest.fixture
def core() -> Core:
    core = Core()
    core.up("a")
    core.up("b")
    return core


def cached_on(core: Core, replica_id: str) -> None:
    """The replica says that it has the prompts of 641 tokens that `core` submits."""
    request = EngineRequest(request_id="", prompt_token_ids=(7,) * 641, sampling_params=SamplingParams(seed=1))
    prefix = PromptPrefix(request)
    stored = list(prefix.blocks(16))
    core.dispatch.step(replica_id, StepUpdate(load=load(), cache=CacheChanges(stored=stored)), core.now)


@pytest.mark.parametrize("replica_id", ["a", "b"])
def test_a_request_goes_to_where_its_prompt_is_cached(core: Core, replica_id: str):
    cached_on(core, replica_id)
    for number in range(3):
        assert sent(core.submit(f"{number}", num_prompt_tokens=641)).replica_id == replica_id


def test_a_hot_prefix_does_not_pile_up(core: Core):
    cached_on(core, "b")
    chosen = [sent(core.submit(f"{number}", num_prompt_tokens=641)).replica_id for number in range(20)]
    assert chosen[:5] == ["b"] * 5
    assert set(chosen[5:]) == {"a", "b"}


def test_a_replica_that_comes_back_is_believed_to_have_nothing(core: Core):
    cached_on(core, "b")
    core.down("b")
    core.up("b")
    assert sent(core.submit("1", num_prompt_tokens=641)).replica_id == "a", "it is drawn first, and neither has more"


def test_one_that_waits_goes_to_its_prefix_when_there_is_room():
    core = Core(RouterConfig(max_waiting_per_replica=1))
    core.up("a")
    core.up("b")
    cached_on(core, "b")
    one, other = sent(core.submit("1")), sent(core.submit("2"))
    for replica_id in ("a", "b"):
        core.step(replica_id=replica_id, load=load(1, 1))
    assert core.submit("waits", num_prompt_tokens=641) == []
    last = {item.replica_id: item for item in (one, other)}["b"]
    actions = core.step(delta(last.attempt, 0, 5, finish=FinishReason.LENGTH), replica_id="b")
    assert sent(actions).replica_id == "b"
