from functools import partial

import pytest
import torch
from torch import nn

from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.products import PackedProduct
from holdfast.worker.models.experts import ExpertRouter, Experts
from holdfast.worker.models.linear import RowActivation, settle

E, H, INNER = 4, 16, 24


class StoredExperts(nn.Module):
    """An experts module as transformers describes them."""

    def __init__(self, *, transposed: bool, has_bias: bool, has_gate: bool = True) -> None:
        super().__init__()
        self.is_transposed, self.has_bias, self.has_gate = transposed, has_bias, has_gate
        self.act_fn = nn.SiLU()
        first = "gate_up_proj" if has_gate else "up_proj"
        width = 2 * INNER if has_gate else INNER
        self.register_parameter(first, nn.Parameter(torch.randn(E, *((H, width) if transposed else (width, H)))))
        self.down_proj = nn.Parameter(torch.randn(E, *((INNER, H) if transposed else (H, INNER))))
        if has_bias:
            self.register_parameter(f"{first}_bias", nn.Parameter(torch.randn(E, width)))
            self.down_proj_bias = nn.Parameter(torch.randn(E, H))

    def _apply_gate(self, rows):
        gate, up = rows.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def one_by_one(self, x, index, weights):
        """Each token through each of its experts, as the formula has it."""
        first = "gate_up_proj" if self.has_gate else "up_proj"
        turn = (lambda w: w) if self.is_transposed else (lambda w: w.T)
        output = torch.zeros_like(x)
        for token in range(len(x)):
            for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
                bias = getattr(self, f"{first}_bias")[expert] if self.has_bias else 0
                inner = x[token] @ turn(getattr(self, first)[expert]) + bias
                inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
                output[token] += weight * (
                    inner @ turn(self.down_proj[expert]) + (self.down_proj_bias[expert] if self.has_bias else 0)
                )
        return output


def settled(experts):
    settle(experts, partial(PackedProduct, NativePool(1)))
    return experts


def inputs(num_tokens):
    weights, index = torch.rand(num_tokens, E).topk(2, dim=-1)
    return torch.randn(num_tokens, H), index, weights


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
def test_every_token_goes_through_its_experts(transposed, has_bias, has_gate):
    stored = StoredExperts(transposed=transposed, has_bias=has_bias, has_gate=has_gate)
    batch = inputs(9)
    expected = stored.one_by_one(*batch)
    assert Experts.can_replace(stored)
    experts = settled(Experts(stored))
    assert torch.allclose(experts(*batch), expected, atol=1e-4)
    assert not list(stored.parameters()), "the weights are held once"


def test_a_token_has_the_same_bits_in_any_company():
    experts = settled(Experts(StoredExperts(transposed=False, has_bias=True)))
    x, index, weights = inputs(40)
    together = experts(x, index, weights)
    for start, end in ((0, 1), (7, 9), (12, 40)):
        assert torch.equal(experts(x[start:end], index[start:end], weights[start:end]), together[start:end])


def test_experts_of_another_form_are_left_alone():
    other = StoredExperts(transposed=False, has_bias=False)
    other.post_expert_norm = nn.LayerNorm(H)
    assert not Experts.can_replace(other)
    assert not Experts.can_replace(nn.Linear(2, 2))


class SomeRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, 8192))
        self.seen = []

    def forward(self, x, scale):
        self.seen.append(len(x))
        logits = x @ self.weight.T * scale
        return logits, *logits.topk(2, dim=-1)


def test_a_router_is_always_called_with_the_same_number_of_rows():
    plain = SomeRouter()
    assert ExpertRouter.can_replace(plain)
    x = torch.randn(1, 70, 8192)
    results = ExpertRouter(plain)(x, 2.0)
    assert plain.seen == [32, 32, 32]
    assert [len(result) for result in results] == [70, 70, 70]
    for result, alone in zip(results, ExpertRouter(plain)(x[:, 33:34], 2.0), strict=True):
        assert torch.equal(result[33:34], alone)


@pytest.mark.parametrize("width", [1, 48, 64, 100])
def test_an_activation_has_the_same_bits_for_a_row_in_any_company(width):
    from transformers.activations import ACT2FN

    stored = ACT2FN["silu"]
    assert RowActivation.can_replace(stored)
    activation = RowActivation(stored)
    x = torch.randn(1, 37, width)
    together = activation(x)
    assert torch.allclose(together, torch.nn.functional.silu(x))
    for row in range(37):
        assert torch.equal(activation(x[:, row : row + 1]), together[:, row : row + 1])
