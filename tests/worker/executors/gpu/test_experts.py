"""Kernels of a mixture of experts against plain loops: choices with ties, groups, products, sums in their order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.executors.gpu.launches import Launches
from holdfast.worker.executors.gpu.linear_tiles import LinearTile
from holdfast.worker.executors.gpu.mixtures import MixtureLaunches, RowGroups, most_tiles
from holdfast.worker.executors.gpu.weights import DeviceMixture
from holdfast.worker.executors.layout import Activation
from holdfast.worker.executors.linears import Linear

LAUNCHES = MixtureLaunches(launch)
I32 = torch.int32
NOTHING = torch.empty(0)


def mixture(num_experts: int, top_k: int, scoring: str = "softmax", normalized: bool = True) -> DeviceMixture:
    """Without weights."""
    return DeviceMixture(
        router=Linear(weights=(NOTHING,)),
        num_experts=num_experts,
        top_k=top_k,
        scoring=scoring,
        normalized=normalized,
        activation=Activation.SILU,
        has_gate=True,
        up=NOTHING,
        up_bias=None,
        down=NOTHING,
        down_bias=None,
        num_slices=1,
        shared=None,
        has_gate_of_shared=False,
    )


def chosen_of(one: DeviceMixture, logits: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shape = (len(logits), one.top_k)
    chosen, weights = torch.full(shape, -7, dtype=I32), torch.full(shape, torch.nan)
    slots = torch.zeros(len(logits), dtype=I32) if slots is None else slots
    LAUNCHES.choose(one, logits, slots, chosen, weights)
    return chosen, weights


def by_hand(one: DeviceMixture, logits: list[float]) -> tuple[list[int], Tensor]:
    """As `choose_experts` of the native executor: the largest that is left, of equal ones the first; float64."""
    order = sorted(range(one.num_experts), key=lambda expert: (-logits[expert], expert))
    chosen = sorted(order[: one.top_k])
    exact = torch.tensor(logits, dtype=torch.float64)
    if one.scoring == "softmax_of_top":
        return chosen, exact[chosen].softmax(0)
    scores = exact.softmax(0) if one.scoring == "softmax" else exact.sigmoid()
    weights = scores[chosen]
    return chosen, weights / weights.sum() if one.normalized else weights


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_the_largest_logits_are_chosen_and_of_equal_ones_the_first(data):
    num_experts = data.draw(st.integers(1, 40))
    one = mixture(
        num_experts,
        data.draw(st.integers(1, min(8, num_experts))),
        data.draw(st.sampled_from(("softmax", "softmax_of_top", "sigmoid"))),
        data.draw(st.booleans()),
    )
    value = st.sampled_from((-3.0, -0.0, 0.0, 0.5, 0.75, 2.0, 1e-40, -1e-40, -torch.inf))
    rows = data.draw(st.lists(st.lists(value, min_size=num_experts, max_size=num_experts), min_size=1, max_size=3))
    logits = torch.nn.functional.pad(torch.tensor(rows), (0, 1), value=99.0)  # the gate of the shared expert
    logits[:, :num_experts] = torch.where(logits[:, :num_experts] < -9, -50.0, logits[:, :num_experts])
    chosen, weights = chosen_of(one, logits)
    for row, values in enumerate(logits[:, :num_experts].tolist()):
        expected, exact = by_hand(one, [0.0 if abs(value) < 1e-38 else value for value in values])
        assert chosen[row].tolist() == expected
        torch.testing.assert_close(weights[row].double(), exact, rtol=1e-5, atol=1e-7)


def test_padding_chooses_nothing_and_what_is_not_a_number_is_passed_on():
    logits = torch.tensor([[1.0, 2.0, 3.0], [torch.nan] * 3, [1.0, torch.nan, 3.0]])
    chosen, weights = chosen_of(mixture(3, 2), logits, torch.tensor([-1, 4, 5], dtype=I32))
    assert chosen[0].tolist() == [-1, -1]
    assert all(0 <= first < second < 3 for first, second in chosen[1:].tolist())
    assert weights[1:].isnan().all()


def grouped(chosen: Tensor, num_experts: int, rows: int) -> RowGroups:
    """In buffers that are full of other steps' rests."""
    num_tiles = most_tiles(chosen.numel(), num_experts, rows)
    groups = RowGroups(
        LinearTile(64, rows, 32, 4, 2),
        torch.full((num_tiles,), 99, dtype=I32),
        torch.full((num_tiles, rows), 9999, dtype=I32),
    )
    LAUNCHES.group(chosen, num_experts, groups)
    return groups


def check_groups(chosen: Tensor, num_experts: int, rows: int) -> None:
    groups, flat = grouped(chosen, num_experts, rows), chosen.flatten().tolist()
    tiles = zip(groups.experts.tolist(), groups.rows.tolist(), strict=True)
    used = [(expert, places) for expert, places in tiles if expert >= 0]
    assert groups.experts.tolist() == [expert for expert, _ in used] + [-1] * (len(groups.experts) - len(used))
    found = {expert: [place for own, places in used if own == expert for place in places] for expert, _ in used}
    for expert in range(num_experts):
        expected = [place for place, choice in enumerate(flat) if choice == expert]
        padding = -len(expected) % rows
        assert found.get(expert, []) == expected + [-1] * padding


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_each_row_is_in_one_tile_of_each_expert_it_has_chosen(data):
    """Experts without rows, with one, with all; padding between; more choices than a program takes at a time."""
    num_experts, rows = data.draw(st.integers(1, 20)), data.draw(st.sampled_from((16, 32, 128)))
    few = data.draw(st.lists(st.integers(-1, num_experts - 1), min_size=1, max_size=4))
    count = data.draw(st.sampled_from((1, 7, 40, 300, 1300)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    picks = torch.randint(0, len(few), (count,), generator=generator)
    check_groups(torch.tensor(few, dtype=I32)[picks], num_experts, rows)


def test_there_are_tiles_for_any_choice():
    """As many as the worst choice takes: one row for each expert but one, which has the rest."""
    for count in (1, 5, 16, 17, 40, 100):
        for num_experts in (1, 3, 16, 64):
            begun = min(num_experts, count)
            worst = [*range(begun - 1), *[begun - 1] * (count - begun + 1)]
            sizes = torch.bincount(torch.tensor(worst))
            assert most_tiles(count, num_experts, 16) == int((-(-sizes // 16)).sum())


@pytest.mark.parametrize(("dtype", "num_rows"), [(torch.bfloat16, 16), (torch.float32, 64)])
def test_a_product_of_an_expert_has_the_bits_of_a_linear_by_its_weights(dtype, num_rows):
    """In tiles of any size. Places that no tile names keep what was there: those of padding."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*size, generator=generator).to(dtype) for size in ((9, 80), (5, 72, 80)))
    bias = torch.randn(5, 72, generator=generator)
    chosen = torch.tensor([[0, 3], [3, 4], [0, 4], [-1, -1], [3, 4], [0, 3], [2, 3], [0, 4], [3, 4]], dtype=I32)
    groups = grouped(chosen, 5, num_rows)
    up = torch.full((1, 18, 72), torch.nan)
    LAUNCHES.grouped(x, weight, groups, up, sharers=2, bias=bias)
    inner = x.repeat_interleave(2, 0) * 2
    down = torch.full((4, 18, 40), torch.nan)
    LAUNCHES.grouped(inner, weight[:, 8:48], groups, down, sharers=1)
    for place, expert in enumerate(chosen.flatten().tolist()):
        if expert < 0:
            assert up[:, place].isnan().all()
            continue
        row, of_expert = x[place // 2][None], Linear(weights=(weight[expert],), bias=bias[expert])
        exact = row[0].double() @ weight[expert].double().T + bias[expert].double()
        torch.testing.assert_close(up[0, place].double(), exact, rtol=0, atol=2e-5)
        alone, parts = torch.empty(1, 1, 72), torch.empty(4, 1, 40)
        Launches(launch).linear(row, of_expert, alone)
        assert torch.equal(up[:, place], alone[:, 0])
        Launches(launch).linear(row * 2, Linear(weights=(weight[expert][8:48].contiguous(),)), parts)
        assert torch.equal(down[:, place], parts[:, 0])


def test_experts_are_added_in_ascending_order_then_the_shared_one_then_slices_as_a_tree():
    """By numbers whose sum is another one in any other order: a large one swallows small ones beside it."""
    big, one = 2.0**25, 1.0
    chosen, weights = torch.tensor([[1, 2, 7]], dtype=I32), torch.ones(1, 3)
    cases = {(big, -big, one): one, (one, big, -big): 0.0, (one, -big, big): 0.0, (-big, big, one): one}
    for numbers, expected in cases.items():
        sums, out = torch.tensor(numbers).view(1, 3, 1), torch.empty(1, 1)
        LAUNCHES.add(sums, chosen, weights, out, bias=None, shared=None, gates=None)
        assert out.item() == expected
        sums, shared = sums[:, :2].contiguous(), sums[:, 2:]
        LAUNCHES.add(sums, chosen[:, :2], weights[:, :2], out, bias=None, shared=shared, gates=None)
        assert out.item() == expected, "of two experts and the shared one"
    parts = [big, one, -big, one, -big, one, big, 3.0]  # as a tree ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
    level = [torch.tensor(part) for part in parts]
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    out = torch.empty(1, 1)
    sums = torch.tensor(parts).view(8, 1, 1)
    LAUNCHES.add(sums, chosen[:, :1], weights[:, :1], out, bias=None, shared=None, gates=None)
    assert out.item() == level[0].item() != sum(parts)


@pytest.mark.parametrize("num_slices", [1, 2, 4, 8])
@pytest.mark.parametrize("has_shared", [True, False])
def test_a_sum_of_experts_is_exact(num_slices, has_shared):
    """Columns of wider rows; the second row is padding. Biases, of all but 2 slices, are a part of the first slice."""
    generator = torch.Generator().manual_seed(2)
    sums, weights, bias, shared, gates = (
        torch.randn(*size, generator=generator)
        for size in ((num_slices, 9, 20), (3, 3), (6, 30), (num_slices, 3, 30), (3, 7))
    )
    chosen = torch.tensor([[0, 2, 5], [-1, -1, -1], [1, 2, 3]], dtype=I32)
    sums[:, 3:6], weights[1] = torch.nan, torch.nan
    has_bias = num_slices != 2
    bias = bias if has_bias else torch.zeros_like(bias)
    out = torch.full((3, 30), 7.0)
    of_shared, of_gates = (shared[:, :, 4:24], gates[:, 6:]) if has_shared else (None, None)
    of_bias = bias[:, 4:24] if has_bias else None
    LAUNCHES.add(sums, chosen, weights, out[:, 4:24], bias=of_bias, shared=of_shared, gates=of_gates)
    assert (out[:, :4] == 7.0).all()
    assert (out[:, 24:] == 7.0).all()
    for row in range(3):
        total = torch.zeros(20, dtype=torch.float64)
        for number, expert in enumerate(chosen[row].tolist()):
            if expert >= 0:
                given_by = sums[:, row * 3 + number].double().sum(0) + bias[expert, 4:24].double()
                total += given_by * weights[row, number].double()
        if has_shared:
            total += shared[:, row, 4:24].double().sum(0) * gates[row, 6].double().sigmoid()
        torch.testing.assert_close(out[row, 4:24].double(), total, rtol=0, atol=1e-5)
