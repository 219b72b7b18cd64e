"""A bit of the KV cache flips in a replica that serves: what that does to requests, and what finds it.

No self-check reads the blocks of other requests. So a number that is wrong and finite is found by nothing: it goes as
far as its cached prefix is taken over, and no further. One that is no number is found at once.
"""

import threading
from collections.abc import Iterator

import pytest
import torch

from holdfast.worker.config import HealthConfig
from holdfast.worker.engine.model_runner import ModelRunner
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate
from tests.parity.families import save_tiny_model
from tests.worker.replica.test_known_answer_bits import config_of
from tests.worker.replica.test_known_answer_check import TIMEOUT_S, Listener

PROMPT = tuple(range(3, 53))
"""Three blocks and a bit."""

EXPONENT = 0x7F800000
"""Of a float32: all of these bits set, it is infinite or no number."""

Answer = list[tuple[int, float]]
"""Tokens and their log-probabilities."""


class Asker(Listener):
    """Asks one request at a time."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._engine = replica.engine
        self._engine.attach(self)
        self._ended = threading.Event()

    def on_update(self, update: StepUpdate) -> None:
        for delta in update.deltas:
            self._answer += [(one.token_id, one.logprob) for one in delta.logprobs]
            self._num_cached = max(self._num_cached, delta.num_cached_tokens)
            if delta.finish_reason is not None:
                self._ended.set()
        for rejection in update.rejections:
            self._error = rejection.error
            self._ended.set()

    def ask(self, **fields: object) -> tuple[Answer, int, Exception | None]:
        """The answer to the one question, how many tokens of its prompt were cached, and its error."""
        self._ended.clear()
        self._answer: Answer = []
        self._num_cached, self._error = 0, None
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True, logprobs=1)
        request = EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params, **fields)
        self._engine.submit(request, self)
        assert self._ended.wait(TIMEOUT_S)
        return self._answer, self._num_cached, self._error


@pytest.fixture
def pages(tmp_path) -> Iterator[tuple[Replica, Asker, torch.Tensor]]:
    """A replica, who asks it, and the first layer's pages as bits: [blocks, numbers]."""
    config, group = config_of(save_tiny_model("llama", tmp_path), "native"), SingleRank()
    assert config.health == HealthConfig(self_check_every_s=3600)
    runner = ModelRunner.load(config, group, device=torch.device("cpu"))
    replica = Replica.around(config, runner, group)
    found = runner.backend.executor._cache._layers[0].pages
    yield replica, Asker(replica), found.view(torch.int32).flatten(1)
    replica.stop()


def taken(bits: torch.Tensor, before: torch.Tensor) -> list[int]:
    """The blocks that have been written since."""
    return (bits != before).any(dim=1).nonzero().flatten().tolist()


def test_a_finite_number_that_is_wrong_reaches_who_takes_over_its_prefix_and_nobody_else(pages):
    replica, asker, bits = pages
    before = bits.clone()
    right, num_cached, _ = asker.ask()
    assert num_cached == 0
    num_changed = 0
    for block in taken(bits, before):
        at = int((bits[block] & EXPONENT).argmax())
        bits[block, at] ^= 1 << 22  # the mantissa's highest bit
        answer, num_cached, error = asker.ask()
        assert num_cached > 0
        assert error is None, "nothing finds it"
        num_changed += answer != right
        assert asker.ask(cache_salt=f"other {block}")[0] == right, "computed anew, it is right"
        bits[block, at] ^= 1 << 22
        assert asker.ask()[0] == right
    assert num_changed > 0, "no flip has changed an answer: the test does not flip what is read"
    asked = replica._known_answer_check
    num_right = asked.num_right
    assert asked.ask()
    while asked.num_right == num_right and replica.engine.failure is None:
        replica.engine.stats(TIMEOUT_S)
    assert replica.engine.failure is None, "the self-check reads blocks of its own"


def test_what_is_no_number_fails_its_request_and_leaves_the_cache(pages):
    replica, asker, bits = pages
    before = bits.clone()
    right, _, _ = asker.ask()
    block = taken(bits, before)[0]
    at = int((bits[block] & EXPONENT).argmax())
    bits[block, at] |= EXPONENT | 1  # no number
    answer, _, error = asker.ask()
    assert "not finite" in str(error), answer
    answer, num_cached, error = asker.ask()
    assert (answer, num_cached, error) == (right, 0, None), "its blocks have left the cache, and are cleared"
    assert replica.engine.failure is None
