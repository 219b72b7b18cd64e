"""Recurrences compute what Hugging Face and a loop in float64 compute, in the same bits however tokens come."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.worker.executors.cpu import exchange
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.cpu.library import missing_instructions
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models import reference
from holdfast.worker.models.reference import Reference
from holdfast.worker.step_plan import ScheduledSequence, StepPlan
from tests.fake_group import run_ranks
from tests.parity.hybrids import DELTA_NETS, KIMIS, MAMBAS, has_reference, made, save_hybrid
from tests.worker.executors.cpu.native import library_or_skip, other_classes, same_bits
from tests.worker.models.layouts import stated

TOLERANCE = 1e-4
BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 16, 64, 4
IDS = torch.randint(3, 126, (3, 90), generator=torch.Generator().manual_seed(4)).tolist()


@dataclass
class Piece:
    """Tokens of a sequence, the last of which may be drafts. The sequence has the slot and the blocks of its number."""

    sequence: int
    first: int
    token_ids: Sequence[int]
    num_drafts: int = 0
    slot: int | None = None

    def scheduled(self) -> ScheduledSequence:
        num_blocks = -(-(self.first + len(self.token_ids)) // BLOCK_SIZE)
        return ScheduledSequence(
            sequence_id=self.sequence,
            first_position=self.first,
            token_ids=tuple(self.token_ids),
            block_ids=tuple(range(self.sequence * 16, self.sequence * 16 + num_blocks)),
            draw=None,
            num_draws=len(self.token_ids),
            num_drafts=self.num_drafts,
            state_slot=self.sequence if self.slot is None else self.slot,
        )


class Runner:
    """An executor of one rank."""

    def __init__(
        self,
        layout: DecoderLayout,
        group: TensorParallelGroup | None = None,
        *,
        name: str | None = None,
        threads: int = 2,
        num_drafts: int = 0,
    ) -> None:
        self.executor = CpuExecutor(
            layout, group or SingleRank(), max_positions=512, threads=threads, instruction_class=name
        )
        self.executor.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
        self.executor.allocate_states(NUM_SLOTS, num_drafts)

    def step(self, *pieces: Piece) -> list[Tensor]:
        """Logits of all tokens, by piece."""
        plan = StepPlan(step_id=0, others=tuple(piece.scheduled() for piece in pieces))
        logits = self.executor.run(StepBatch.of(plan), with_logits=True).logits
        assert logits is not None
        return list(logits.clone().split([len(piece.token_ids) for piece in pieces]))

    def run(self, cut: int, sequence: int = 0) -> Tensor:
        """A whole sequence, in pieces of `cut` tokens."""
        ids = IDS[sequence]
        firsts = range(0, len(ids), cut)
        return torch.cat([self.step(Piece(sequence, first, ids[first : first + cut]))[0] for first in firsts])

    @property
    def slots(self) -> list[Tensor]:
        """[slots, numbers] of each layer that keeps a state."""
        assert self.executor._states is not None
        return self.executor._states.pools


@pytest.fixture(scope="module", params=[*DELTA_NETS, *KIMIS, *MAMBAS])
def pattern(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def layout(pattern: str, tmp_path_factory: pytest.TempPathFactory) -> DecoderLayout:
    return stated(save_hybrid(tmp_path_factory.mktemp("model"), pattern))


@pytest.fixture
def runner(layout: DecoderLayout) -> Iterator[Runner]:
    runner = Runner(layout)
    yield runner
    runner.executor.close()


@pytest.fixture(scope="module", params=["dense", "kimi", "granite, dense"])
def simple(request: pytest.FixtureRequest) -> str:
    """A pattern of each recurrence."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def dense(simple: str, tmp_path_factory: pytest.TempPathFactory) -> DecoderLayout:
    return stated(save_hybrid(tmp_path_factory.mktemp("model"), simple))


def excess(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max())


def test_they_have_the_logits_of_hugging_face_and_the_same_bits_in_any_pieces(pattern, runner):
    model = made(pattern)
    whole = runner.run(90)
    if has_reference(model.config):
        assert excess(whole, model(torch.tensor(IDS[:1]), use_cache=False).logits[0]) < TOLERANCE
    for cut in (1, 7, 64):
        assert same_bits(runner.run(cut), whole), cut


def test_they_have_the_logits_of_a_loop_in_float64(layout, runner):
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(IDS[0]))
    assert excess(runner.run(90), exact) < TOLERANCE


def test_neighbours_and_slots_of_others_change_no_bit(layout, runner):
    alone = [runner.run(90, sequence) for sequence in range(3)]
    other = Runner(layout, threads=1)
    for slots in other.slots:
        slots.fill_(torch.nan)
    done = [0, 0, 0]
    said: list[list[Tensor]] = [[], [], []]
    for counts in ((5, 0, 40), (1, 16, 1), (30, 1, 7), (54, 73, 42)):
        pieces = [Piece(i, done[i], IDS[i][done[i] : done[i] + n]) for i, n in enumerate(counts) if n]
        for piece, logits in zip(pieces, other.step(*pieces), strict=True):
            said[piece.sequence].append(logits)
            done[piece.sequence] += len(logits)
    other.executor.close()
    assert all(same_bits(torch.cat(ours), theirs) for ours, theirs in zip(said, alone, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_class_has_the_same_bits(simple, dense, dtype, tmp_path):
    numbers = getattr(torch, dtype)
    layout = stated(save_hybrid(tmp_path, simple, numbers)) if dtype == "bfloat16" else dense
    library_or_skip("avx2")
    expected = None
    for name in ("avx2", *other_classes(numbers)):
        if missing_instructions(name):
            continue
        runner = Runner(layout, name=name)
        logits = runner.run(7)
        runner.executor.close()
        expected = logits if expected is None else expected
        assert same_bits(logits, expected), name


SHARED = ["dense", "mixture", "by key heads, mixture", "state last", "kimi", "kimi, latents last", *MAMBAS]


@pytest.mark.in_turn
@pytest.mark.parametrize("pattern", SHARED, scope="module")
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_bits_of_one(pattern, size, tmp_path):
    assert_ranks_agree(save_hybrid(tmp_path, pattern), size)


@pytest.mark.parametrize("pattern", ["granite, mixture", "falcon, norms"], scope="module")
def test_ranks_without_shared_memory_have_the_bits_of_one(pattern, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "attach", lambda group, num_bytes: None)
    assert_ranks_agree(save_hybrid(tmp_path, pattern), 4)


def assert_ranks_agree(folder: Path, size: int) -> None:

    def logits(group: TensorParallelGroup) -> Tensor:
        runner = Runner(stated(folder, group), group, threads=1)
        said = runner.run(31)
        runner.executor.close()
        return said

    (alone,) = run_ranks(1, logits)
    assert all(same_bits(said, alone) for said in run_ranks(size, logits))


@pytest.mark.parametrize("accepted", range(4))
def test_a_step_goes_on_behind_any_of_its_drafts(layout, accepted):
    """Positions 18 to 20 are drafts of step after step; of the last ones `accepted` are right."""
    runner = Runner(layout, num_drafts=3)
    expected = runner.run(90)
    ids, wrong = IDS[0], [5, 6, 7]
    runner.step(Piece(0, 0, ids[:15]))
    runner.step(Piece(0, 15, [*ids[15:17], *wrong], num_drafts=3))
    drafts = ids[18 : 18 + accepted] + wrong[accepted:]
    said = runner.step(Piece(0, 17, [ids[17], *drafts], num_drafts=3))[0][: 1 + accepted]
    assert same_bits(said, expected[17 : 18 + accepted])
    for slots in runner.slots:  # a slot is all there is
        slots[3] = slots[0]
        slots[0] = torch.nan
    said = runner.step(Piece(0, 18 + accepted, ids[18 + accepted : 60], slot=3))[0]
    runner.executor.close()
    assert same_bits(said, expected[18 + accepted : 60])


# --- mistakes that must show ---


def broken_window(runner: Runner) -> None:
    """The inputs before a piece are those of one token earlier."""
    for slots, state in zip(runner.slots, runner.executor._kept_states, strict=True):
        row = state.state_length(1) - state.state_length(0)
        rows = slots[0, : row * (state.width - 1)].view(state.width - 1, row)
        rows.copy_(rows.roll(1, 0))


def rounded_states(runner: Runner) -> None:
    for slots, state in zip(runner.slots, runner.executor._kept_states, strict=True):
        first = state.state_length(0) - (state.state_length(1) - state.state_length(0)) * (state.width - 1)
        first = slots.shape[1] - first
        slots[0, first:] = slots[0, first:].bfloat16().float()


def other_slot(runner: Runner) -> None:
    for slots in runner.slots:
        slots[[0, 1]] = slots[[1, 0]]


@pytest.mark.parametrize("mistake", [broken_window, rounded_states, other_slot])
def test_a_state_that_is_spoilt_between_two_steps_shows(dense, mistake):
    runner = Runner(dense)
    expected = runner.run(90)
    runner.step(Piece(0, 0, IDS[0][:33]), Piece(1, 0, IDS[1][:33]))
    mistake(runner)
    said = runner.step(Piece(0, 33, IDS[0][33:]))[0]
    runner.executor.close()
    assert not same_bits(said, expected[33:])


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("granite, dense", {"dt_bias": torch.zeros(8)}),
        ("granite, dense", {"conv_bias": None}),
        ("granite, dense", {"skip": torch.zeros(8)}),
        ("granite, dense", {"norm_heads": 0}),
        ("kimi", {"dt_bias": torch.zeros(4, 32)}),
        ("kimi", {"a_log": torch.zeros(4)}),
    ],
)
def test_a_part_that_is_left_out_shows(pattern, changes, tmp_path):
    layout = stated(save_hybrid(tmp_path, pattern))
    layers = [replace(one, state=replace(one.state, **changes)) if one.state else one for one in layout.layers]
    runner = Runner(replace(layout, layers=tuple(layers)))
    expected = made(pattern)(torch.tensor(IDS[:1]), use_cache=False).logits[0]
    assert excess(runner.run(90), expected) > 1000 * TOLERANCE
    runner.executor.close()


def test_decays_in_bfloat16_would_show(dense, monkeypatch):
    """The tolerance is narrow enough to see it."""
    exact = reference.delta_rule

    def rounded(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, **how: bool) -> Tensor:
        return exact(q, k, v, decay.bfloat16().to(decay.dtype), rate, **how)

    monkeypatch.setattr(reference, "delta_rule", rounded)
    wrong = Reference(dense, dtype=torch.float64).run_model(torch.tensor(IDS[0]))
    ours = Runner(dense)
    assert excess(ours.run(90), wrong) > 10 * TOLERANCE
    ours.executor.close()


def test_one_decay_for_all_keys_of_a_head_would_show(tmp_path, monkeypatch):
    exact, layout = reference.delta_rule, stated(save_hybrid(tmp_path, "kimi"))

    def averaged(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, **how: bool) -> Tensor:
        return exact(q, k, v, decay.mean(-1), rate, **how)

    monkeypatch.setattr(reference, "delta_rule", averaged)
    wrong = Reference(layout, dtype=torch.float64).run_model(torch.tensor(IDS[0]))
    ours = Runner(layout)
    assert excess(ours.run(90), wrong) > 10 * TOLERANCE
    ours.executor.close()


def test_drafts_that_are_taken_for_certain_show(dense):
    runner = Runner(dense, num_drafts=3)
    expected = runner.run(90)
    runner.step(Piece(0, 0, [*IDS[0][:20], 5, 6], num_drafts=0))
    said = runner.step(Piece(0, 20, IDS[0][20:]))[0]
    runner.executor.close()
    assert not same_bits(said, expected[20:])
