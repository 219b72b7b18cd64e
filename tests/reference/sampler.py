"""Sampler in PyTorch, an oracle: logits to tokens, as a pure function of (logits, parameters, seed, output position).

A draw is an exponential race, equivalent to the Gumbel-max trick: each token that passed the filters gets an
exponential time, its rate the token's probability, and the earliest wins, which samples from exactly those
probabilities. The noise is a hash of (seed, output position, stream, token id). No generator advances, so a draw can be
repeated anywhere: after a preemption, on another replica, when drafted tokens are verified.

A row's logits processors (`logits_processors.py`) come first; then temperature, min-p, top-k and top-p, in this order.
Each filter is a small function of the rows that use it. A row does not depend on the others: sums and logarithms that
decide between tokens are taken in float64, where no order of computing shows. Greedy rows cost only an argmax.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams
from holdfast.worker.parameters import GREEDY_TEMPERATURE
from tests.reference.logits_processors import apply_logits_processors

TOKEN_STREAM: Final = 0
"""Stream of the noise that draws output tokens. Other uses of a seed take other streams."""

_MASK: Final = 0xFFFFFFFF
_POSITION_PRIME: Final = 0x9E3779B1
_STREAM_PRIME: Final = 0x85EBCA77
_TOKEN_PRIME: Final = 0xC2B2AE3D

_NUCLEUS_SIZES: Final = (64, 1024)
"""How many of the best tokens to sort, in turn, before a whole vocabulary is sorted for top-p."""

_CHUNK_VALUES: Final = 2**17
"""Logits that are worked on at a time, so that the noise stays in cache."""


def draw(logits: Tensor, draws: Sequence[DrawParams], masks: Mapping[int, bytes] | None = None) -> list[int]:
    """The token drawn from each row of `logits` [N, vocab]. Equal scores: the lowest token id wins.

    `masks` are those of the rows that have a grammar, by row.
    """
    processed = [row for row, params in enumerate(draws) if params.logits_settings is not None]
    if not processed:
        return _draw(logits, draws)
    drawn: dict[int, int] = {}
    plain = [row for row, params in enumerate(draws) if params.logits_settings is None]
    if plain:
        drawn.update(zip(plain, _draw(logits[plain], [draws[row] for row in plain]), strict=True))
    edited, chosen = logits[processed].float(), [draws[row] for row in processed]
    apply_logits_processors(
        edited, chosen, {i: masks[row] for i, row in enumerate(processed) if row in masks} if masks else {}
    )
    drawn.update(zip(processed, _draw(edited, chosen), strict=True))
    return [drawn[row] for row in range(len(draws))]


def _draw(logits: Tensor, draws: Sequence[DrawParams]) -> list[int]:
    """As `draw`, once logits processors have been applied."""
    noisy = [row for row, params in enumerate(draws) if params.sampling.temperature >= GREEDY_TEMPERATURE]
    if not noisy:
        return _tokens(logits.argmax(-1))
    greedy = [row for row, params in enumerate(draws) if params.sampling.temperature < GREEDY_TEMPERATURE]
    drawn: dict[int, int] = {}
    if greedy:
        drawn.update(zip(greedy, _tokens(logits[greedy].argmax(-1)), strict=True))
    num_rows = max(1, _CHUNK_VALUES // logits.shape[1])
    for start in range(0, len(noisy), num_rows):
        rows = noisy[start : start + num_rows]
        drawn.update(zip(rows, _draw_noisy(logits[rows].float(), [draws[row] for row in rows]), strict=True))
    return [drawn[row] for row in range(len(draws))]


def _draw_noisy(logits: Tensor, draws: Sequence[DrawParams]) -> list[int]:
    """As `draw`, for rows with a temperature. Overwrites `logits` [N, vocab], float32."""
    vocab_size = logits.shape[1]
    logits *= logits.new_tensor([1 / params.sampling.temperature for params in draws]).unsqueeze(1)
    cut = [row for row, params in enumerate(draws) if params.sampling.min_p > 0]
    if cut:
        logits[cut] = keep_min_p(logits[cut], [draws[row].sampling.min_p for row in cut])
    cut = [row for row, params in enumerate(draws) if 0 < params.sampling.top_k < vocab_size]
    if cut:
        logits[cut] = keep_top_k(logits[cut], [draws[row].sampling.top_k for row in cut])
    cut = [row for row, params in enumerate(draws) if params.sampling.top_p < 1]
    if cut:
        logits[cut] = keep_top_p(logits[cut], [draws[row].sampling.top_p for row in cut])
    keys = [noise_key(params.seed, params.first_output_index, TOKEN_STREAM) for params in draws]
    return _tokens(_race(logits, logits.new_tensor(keys, dtype=torch.int64)))


def keep_min_p(logits: Tensor, min_p: Sequence[float]) -> Tensor:
    """Rows [N, vocab] with -inf where a token's probability is below `min_p` times the best one's. In logits, that is
    a distance from the best, so no probability is needed.
    """
    distance = torch.tensor(min_p, dtype=torch.float64, device=logits.device).log_().unsqueeze(1)
    return logits.masked_fill(logits < logits.amax(1, keepdim=True) + distance, float("-inf"))


def keep_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Rows [N, vocab] with -inf where a logit is below the row's k-th best. Ties with the k-th best stay."""
    best = logits.topk(max(top_k)).values
    last = torch.tensor(top_k, device=logits.device).unsqueeze(1) - 1
    return logits.masked_fill(logits < best.gather(1, last), float("-inf"))


def keep_top_p(logits: Tensor, top_p: Sequence[float]) -> Tensor:
    """Rows [N, vocab] with -inf where a token is not of the nucleus.

    The nucleus is the smallest set of best tokens whose mass is at least p: a token stays while the mass of those
    better than it is below p, so the best always stays. Ties with the last one that stays, stay.
    """
    probabilities = torch.softmax(logits, -1, dtype=torch.float64)
    least = torch.zeros(len(logits), 1, dtype=torch.float64, device=logits.device)
    wanted = torch.tensor(top_p, dtype=torch.float64, device=logits.device).unsqueeze(1)
    undecided = torch.arange(len(logits), device=logits.device)
    for size in (*_NUCLEUS_SIZES, logits.shape[1]):
        best = probabilities[undecided].topk(min(size, logits.shape[1])).values
        stays = best.cumsum(1) - best < wanted[undecided]
        num_staying = stays.sum(1, keepdim=True).clamp_(min=1)
        least[undecided] = best.gather(1, num_staying - 1)
        undecided = undecided[num_staying.squeeze(1) == best.shape[1]]
        if len(undecided) == 0 or best.shape[1] == logits.shape[1]:
            break
    return logits.masked_fill(probabilities < least, float("-inf"))


def _race(logits: Tensor, keys: Tensor) -> Tensor:
    """The winner of each row of `logits` [N, vocab], with noise keyed by `keys` [N]."""
    num_left = int((logits > float("-inf")).sum(1).max())
    if num_left * 8 > logits.shape[1]:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
        return _log_speeds(logits, keys, token_ids).argmax(1)
    token_ids = logits.topk(num_left).indices.sort(dim=1).values
    left = logits.gather(1, token_ids)
    return token_ids.gather(1, _log_speeds(left, keys, token_ids).argmax(1, keepdim=True)).squeeze(1)


def _log_speeds(logits: Tensor, keys: Tensor, token_ids: Tensor) -> Tensor:
    """Logit less the logarithm of a unit exponential time, in float64: the largest one wins the race."""
    uniforms = noise(keys.unsqueeze(1), token_ids).double().add_(0.5).mul_(2.0**-32)
    return logits - uniforms.neg_().log1p_().neg_().log_()


def noise_key(seed: int, position: int, stream: int) -> int:
    """The 32-bit key of one draw's noise. `seed` has up to 63 bits."""
    key = _mix((seed & _MASK) ^ (position * _POSITION_PRIME & _MASK))
    return _mix(key ^ (seed >> 32) ^ (stream * _STREAM_PRIME & _MASK))


def noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits for each token under each key, as int64. The two broadcast.

    Murmur3's finalizer in 64-bit integers, of which only the low 32 bits are kept: the same on every device.
    """
    bits = (keys + token_ids * _TOKEN_PRIME).bitwise_and_(_MASK)
    bits.bitwise_xor_(bits >> 16).mul_(0x85EBCA6B).bitwise_and_(_MASK)
    bits.bitwise_xor_(bits >> 13).mul_(0xC2B2AE35).bitwise_and_(_MASK)
    return bits.bitwise_xor_(bits >> 16)


def _mix(bits: int) -> int:
    """`noise`'s finalizer for one number."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _MASK
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _MASK
    return bits ^ (bits >> 16)


def _tokens(token_ids: Tensor) -> list[int]:
    tokens: list[int] = token_ids.tolist()
    return tokens


def broken_rows(logits: Tensor) -> list[int]:
    """The rows of `logits` [N, vocab] that have a NaN, or whose best logit is infinite. One pass over them."""
    if not logits.shape[0]:
        return []
    best = logits.amax(1)  # a NaN anywhere in a row is the row's
    rows: list[int] = torch.nonzero(~best.isfinite()).flatten().tolist()
    return rows


def with_zeros(logits: Tensor, rows: list[int]) -> Tensor:
    """A copy of `logits` with zeros in these rows, so that whatever reads them finds numbers. The others are as they
    were, bit for bit."""
    mended = logits.clone()
    mended[rows] = 0.0
    return mended
