"""Ranks of the native executor give the bits of the whole model: as threads, and as processes that share memory."""

import signal
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from benchmarks.free_port import pick_port
from holdfast.worker.executors.cpu.library import runnable_classes
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.executors.tensor_parallel import DistributedGroup, SingleRank
from holdfast.worker.models import native_backend as program
from holdfast.worker.models.proof import Answers, Proof
from tests.worker.executors import models, rank_scenarios
from tests.worker.executors.cpu.native import lets_odd_weights_pass
from tests.worker.executors.lives import lives_of
from tests.worker.executors.models import on_ranks
from tests.worker.executors.rank_scenarios import MODELS, all_best, bits_of_models, build, lost, refused

pytestmark = pytest.mark.skipif(not runnable_classes(), reason="the native executor does not run here")

PATIENT_S, IMPATIENT_S = 60.0, 0.5
SCENARIOS = (
    (4, bits_of_models, PATIENT_S),
    (2, bits_of_models, PATIENT_S),
    (2, rank_scenarios.without_collectives, PATIENT_S),
    (2, refused, PATIENT_S),
    (2, partial(lost, how=signal.SIGSTOP), IMPATIENT_S),
    (2, partial(lost, how=signal.SIGKILL), PATIENT_S),
)
"""Ranks, what they do, and after how long a silent one is lost."""


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return bits_of_models(SingleRank())


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_threads_as_ranks_have_the_bits_of_the_whole(whole, size):
    for result in on_ranks(size, bits_of_models):
        for model in MODELS:
            bits, best, shared = result[model]
            assert (bits, best) == whole[model][:2], model
            assert shared


@pytest.mark.parametrize("size", [1, 2, 4])
def test_of_equal_logits_the_lowest_token_wins_over_all_ranks(size, monkeypatch):
    def pairs_of_equals(model):
        head = model.get_output_embeddings().weight
        head[63:] = head[:63]

    change_weights(monkeypatch, pairs_of_equals)
    for found in on_ranks(size, lambda group: all_best(build("llama", group))):
        assert all(0 <= token < 63 for row in found for token in row)
        assert len({token for row in found for token in row}) > 10


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("token", [3, 125])
def test_a_row_that_is_not_finite_on_one_rank_has_no_token(size, token, monkeypatch):
    def break_one(model):
        model.get_output_embeddings().weight[token] = torch.inf

    change_weights(monkeypatch, break_one)
    answers = Answers(layers=(), token_ids=torch.tensor([1]), logits=None)
    lets_odd_weights_pass(monkeypatch)
    monkeypatch.setattr(program, "ask_reference", lambda *args, **kwargs: answers)
    monkeypatch.setattr(program, "check", lambda *args, **kwargs: Proof(reason=None, layer_error=0.0, model_error=0.0))
    for found in on_ranks(size, lambda group: all_best(build("llama", group))):
        assert {token for row in found for token in row} == {-1}


def change_weights(monkeypatch, change):
    """Before any rank takes its share of a model."""
    made = models.hugging_face

    def changed(*args: Any, **named: Any) -> Any:
        model = made(*args, **named)
        change(model)
        return model

    monkeypatch.setattr(models, "hugging_face", changed)


# Real processes: the same four live through one group after another. What each returns comes back to the test.


@pytest.fixture(scope="module")
def lives() -> list[list[Any]]:
    return lives_of(4, _live, [Rendezvous.at("127.0.0.1", pick_port()) for _ in SCENARIOS])


def _live(rank: int, rendezvous: list[Rendezvous], writer: Connection) -> None:
    torch.set_num_threads(1)
    for (size, scenario, timeout_s), place in zip(SCENARIOS, rendezvous, strict=True):
        if rank < size:
            group = DistributedGroup(rank, size, place, data_timeout_s=PATIENT_S)
            group.data_timeout_s = timeout_s
            writer.send(scenario(group))
            group.close()


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "size"), [(0, 4), (1, 2)])
def test_processes_that_share_memory_have_the_bits_of_the_whole(lives, whole, scenario, size):
    for life in lives[:size]:
        for model in MODELS:
            bits, best, shared = life[scenario][model]
            assert (bits, best) == whole[model][:2], model
            assert shared


@pytest.mark.slow
def test_a_step_through_shared_memory_gathers_nothing_else(lives):
    assert [life[2] for life in lives[:2]] == [[0, 0], [0, 0]]


@pytest.mark.slow
def test_where_one_rank_cannot_open_the_memory_all_do_without(lives, whole):
    assert [life[3] for life in lives[:2]] == [(whole["llama"][0], False)] * 2


@pytest.mark.slow
def test_a_stopped_rank_ends_all_steps_once_it_was_silent_for_too_long(lives):
    lost = "a rank of the replica was lost"
    assert lives[0][4] == [f"{lost}: rank 1 is silent"] * 3
    assert set(lives[1][4]) == {f"{lost}: rank 0 has left"}


@pytest.mark.slow
def test_a_killed_rank_ends_all_steps_of_the_others(lives):
    assert lives[0][5:] == [["a rank of the replica was lost: rank 1 has ended"] * 3, 0]
    assert lives[1][5:] == [-signal.SIGKILL]
    assert [len(life) for life in lives[2:]] == [2, 2]
