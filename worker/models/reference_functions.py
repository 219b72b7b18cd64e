"""Functions of the reference executor, in plain torch: products, activations, rotary angles, routing, recurrences."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.executors.coded import FAR, FAR_FROM, LINE, UNIT
from holdfast.worker.executors.layout import Activation, Attention, Experts, Mlp, Rotary, TokenPlaces
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.state_layers import GatedDeltaNet


def product(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """The product of a linear, in the dtype of `x`: this many outputs at a time, into one result, by way of one buffer.

    Small results between large buffers would keep the C heap from using the buffers' memory again.
    """
    y = x.new_empty(*x.shape[:-1], len(weight))
    buffer = x.new_empty(min(rows, len(weight)), weight.shape[1])
    for first in range(0, len(weight), rows):
        part = buffer[: len(weight) - first].copy_(weight[first : first + rows])
        own_bias = None if bias is None else bias[first : first + rows].to(x.dtype)
        y[..., first : first + rows] = F.linear(x, part, own_bias)
    return y


def stays(norm: Norm | None) -> bool:
    """Whether a norm's result takes the residual stream's place."""
    return norm is not None and norm.stays


def unseen(attention: Attention, positions: Tensor) -> Tensor:
    """Whether a query [T] does not see a key [T]."""
    distance = positions[:, None] - positions
    distance = distance.abs() if attention.sees_behind else distance
    hidden = distance < 0
    if attention.sliding_window is not None:
        hidden |= distance >= attention.sliding_window
    return hidden


def placed(places: TokenPlaces | None, x: Tensor, positions: Tensor, second_start: int) -> Tensor:
    """The embedding x [T, hidden] of a prompt, with what is added by places; its second text, if there is one, begins
    at `second_start`.
    """
    if places is None:
        return x
    is_second = (positions >= (second_start or len(positions))).long()
    return x + places.segments.to(x.dtype)[is_second] + places.positions.to(x.dtype)[positions]


def routing(experts: Experts, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The experts chosen by each token, and their weights: both [T, top_k]. Logits are the router's [T, experts]."""
    if experts.scoring == "softmax_of_top":
        top, chosen = logits.topk(experts.top_k, -1)
        return chosen, top.softmax(-1)
    scores = logits.softmax(-1) if experts.scoring == "softmax" else logits.sigmoid()
    chosen = _scores_for_choice(experts, scores).topk(experts.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(experts.least_sum)
    return chosen, weights if experts.scales is None else weights * experts.scales.to(weights.dtype)[chosen]


def _scores_for_choice(experts: Experts, scores: Tensor) -> Tensor:
    """Scores that experts are chosen by [T, experts]: -inf in groups that are not chosen."""
    if experts.selection_bias is not None:
        scores = scores + experts.selection_bias.to(scores.dtype)
    if experts.num_groups == 1:
        return scores
    groups = scores.view(*scores.shape[:-1], experts.num_groups, -1)
    best = groups.topk(experts.group_best, -1).values.sum(-1).topk(experts.top_groups, -1).indices
    kept = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter_(-1, best, True)
    masked: Tensor = groups.masked_fill(~kept[..., None], -torch.inf).view(scores.shape)
    return masked


def rounded_in_units(x: Tensor) -> Tensor:
    """x [..., inputs] as whole numbers times the scale of their unit, which products with units take: of 8 bits, in the
    line of an input that is much larger than those of other lines of 15.
    """
    lines = x.view(*x.shape[:-1], x.shape[-1] // UNIT, UNIT // LINE, LINE)
    of_lines = lines.abs().amax(-1)
    largest, far = of_lines.max(-1, keepdim=True)
    rest = of_lines.scatter(-1, far, 0.0).amax(-1, keepdim=True)
    base = torch.where(largest >= FAR_FROM * rest, torch.maximum(rest, largest / FAR), largest)
    scale = base.clamp_min(2.0**-107)[..., None] / 127
    rounded: Tensor = ((lines / scale).round() * scale).view(x.shape)
    return rounded


def rotated(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """Heads [T, heads, head_dim] turned by their positions [T]."""
    turning, still = x[..., : rotary.num_dims], x[..., rotary.num_dims :]
    angles = (positions.float()[:, None] * rotary.inverse_frequencies).to(x.dtype)[:, None]
    cos, sin = angles.cos() * rotary.scaling, angles.sin() * rotary.scaling
    if rotary.interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turning.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, still), -1)


def activated(activation: Activation, x: Tensor) -> Tensor:
    """An activation of one argument."""
    match activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU:
            return F.relu(x)
        case Activation.RELU_SQUARED:
            return F.relu(x).square()
        case Activation.CLAMPED_SWIGLU:
            raise ValueError("the clamped SwiGLU needs a gate")


def gated(mlp: Mlp, gate: Tensor, up: Tensor) -> Tensor:
    """Input of the down projection of an MLP with a gate, from both its parts [T, intermediate]."""
    if mlp.activation is Activation.CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    return activated(mlp.activation, gate * mlp.gate_scale) * up * mlp.inner_scale


def convolved(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """The causal convolution of each channel of x [T, channels], from its first position on; kernel
    [channels, width].
    """
    width = kernel.shape[-1]
    windows = torch.cat((x.new_zeros(width - 1, x.shape[1]), x)).unfold(0, width, 1)
    sums: Tensor = (windows * kernel.to(x.dtype)).sum(-1)
    return sums if bias is None else sums + bias.to(x.dtype)


def rows_of_table(table: Tensor | Linear, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table by token, [T, columns]; units are dequantized to the dtype."""
    if isinstance(table, Tensor):
        return F.embedding(token_ids, table)
    (units,) = table.units
    return torch.cat([units[token : token + 1].to(dtype) for token in token_ids.tolist()])


def delta_parts(net: GatedDeltaNet) -> list[int]:
    """Lengths of the convolved part, z, b and a, or of the convolved part, b and inputs of gates, among the outputs of
    `net.inputs` and `net.rates`.
    """
    heads = net.num_value_heads
    if net.gates is not None:
        return [net.num_channels, heads, net.gate_inputs]
    return [net.num_channels, heads * net.value_dim, heads, heads]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, *, recalls: bool = True) -> Tensor:
    """The gated delta rule, token by token: q, k [T, heads, keys], v [T, heads, values], rate [T, heads], decay
    [T, heads] or [T, heads, keys]. Without the delta rule's recall, the state space of Mamba2.
    """
    decay = decay.reshape(*decay.shape[:2], -1, 1)
    state, out = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]), torch.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t]
        write = rate[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state) if recalls else v[t])
        state = state + k[t, :, :, None] * write[:, None]
        out[t] = torch.einsum("hk,hkv->hv", q[t], state)
    return out


def softcapped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
