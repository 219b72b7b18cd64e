"""Row rules are kept, and trials find out when a row's bits depend on its company."""

import pytest
import torch
from torch import Tensor

from holdfast.worker.models.gpu_row_rules import (
    RowRule,
    RowRules,
    cancelling_product,
    rows_agree,
)
from holdfast.worker.models.hf_gather_backend import tried_product

CPU = torch.device("cpu")


class RecordingKernel:
    """Doubles its rows, and notes how many there were in each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, rows: Tensor) -> Tensor:
        self.calls.append(len(rows))
        return rows * 2


@pytest.mark.parametrize(
    ("rule", "num_rows", "calls"),
    [
        (RowRule(), 5, [5]),
        (RowRule(min_rows=2), 1, [2]),
        (RowRule(min_rows=2), 3, [3]),
        (RowRule(multiple_of=4), 9, [12]),
    ],
)
def test_kernels_are_called_with_allowed_sizes_only(rule, num_rows, calls):
    kernel = RecordingKernel()
    x = torch.randn(num_rows, 3)
    assert torch.equal(rule.run(kernel, x), x * 2)
    assert kernel.calls == calls


def test_leading_dimensions_are_kept():
    x = torch.randn(2, 3, 5)
    assert torch.equal(RowRule(multiple_of=4).run(RecordingKernel(), x), x * 2)


def test_the_product_of_a_trial_is_rounding_error_alone():
    rows, weight = cancelling_product(70, 33, 10, torch.bfloat16, CPU)
    assert rows.shape == (10, 33)
    assert weight.shape == (70, 33)
    assert (rows.double() @ weight.double().T).abs().max() < 1e-12
    assert rows.abs().mean() > 0.5
    assert weight.abs().mean() > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd_count", [1, 3, 16, 33, 100, 256])
def test_a_trial_notices_another_order_of_summing(dtype, odd_count):
    """A kernel that sums backwards at one number of rows: rounding to bfloat16 would hide it for ordinary numbers."""
    rows, weight = cancelling_product(64, 128, 256, dtype, CPU)

    def forwards(x: Tensor) -> Tensor:
        return _summed_in_order(x, weight)

    def backwards_at_times(x: Tensor) -> Tensor:
        return _summed_in_order(x.flip(1), weight.flip(1)) if len(x) == odd_count else forwards(x)

    assert rows_agree(forwards, RowRule(), rows)
    assert not rows_agree(backwards_at_times, RowRule(), rows)


def test_a_floor_of_rows_mends_a_kernel_that_differs_below_it():
    rows, weight = cancelling_product(64, 128, 64, torch.float32, CPU)

    def differs_below_four(x: Tensor) -> Tensor:
        return _summed_in_order(x.flip(1), weight.flip(1)) if len(x) < 4 else _summed_in_order(x, weight)

    assert not rows_agree(differs_below_four, RowRule(min_rows=2), rows)
    assert rows_agree(differs_below_four, RowRule(min_rows=4), rows)


def test_a_trial_notices_neighbours_and_places():
    rows = torch.randn(64, 16)
    assert not rows_agree(lambda x: x + x.mean(0), RowRule(), rows)
    assert not rows_agree(lambda x: x + torch.arange(len(x))[:, None] // 16, RowRule(), rows)


def test_the_first_rule_that_holds_is_taken_and_tried_once():
    rules = RowRules(CPU)
    tried = []

    def holds(rule: RowRule) -> bool:
        tried.append(rule.min_rows)
        return rule.min_rows >= 4

    candidates = [RowRule(min_rows=rows) for rows in (1, 2, 4, 8)]
    assert rules.choose("a", candidates, holds).min_rows == 4
    assert rules.choose("a", candidates, holds).min_rows == 4
    assert tried == [1, 2, 4]
    assert rules.report.row_invariant
    assert list(rules.report.rules.values()) == [RowRule(min_rows=4)]


def test_a_kind_without_any_rule_is_reported_and_gets_the_first_one():
    rules = RowRules(CPU)
    assert rules.choose("hopeless", [RowRule(), RowRule(multiple_of=4)], lambda rule: False) == RowRule()
    assert not rules.report.row_invariant
    assert rules.report.failures == ("hopeless",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_computes_what_torch_computes_under_the_rule_of_its_shape(dtype, has_bias, monkeypatch):
    monkeypatch.setattr(RowRules, "choose", lambda rules, name, candidates, holds: RowRule(multiple_of=4))
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((64, 48), (2, 5, 48), (64,)))
    bias = bias if has_bias else None
    product = tried_product(RowRules(CPU), weight, bias)
    torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight, bias))


def _summed_in_order(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, added up one term after the other in float32."""
    total = torch.zeros(len(x), len(weight))
    for column in range(x.shape[1]):
        total += x[:, column, None].float() * weight[:, column].float()
    return total.to(x.dtype)
