"""Linears on a GPU: torch's product, called with numbers of rows under which rows do not depend on their neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.models.gpu_row_rules import LARGEST_TRIAL, RowRule, RowRules, cancelling_product, rows_agree
from holdfast.worker.models.linear import Kernel


def tried_product(rules: RowRules, weight: Tensor, bias: Tensor | None) -> Kernel:
    """The product with a weight [out, in], under the rule of its shape and type."""
    weight = weight.contiguous()
    rule = _choose_rule(rules, weight, bias is not None)

    def product(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return lambda x: rule.run(product, x)


def linear_candidates() -> list[RowRule]:
    """Rules for a linear, cheapest first: any size, a floor, multiples."""
    return [RowRule(min_rows=rows) for rows in (1, 2, 4, 8, 16)] + [RowRule(multiple_of=rows) for rows in (4, 16)]


def _choose_rule(rules: RowRules, weight: Tensor, has_bias: bool) -> RowRule:
    """The rule for weights of this shape and type; their values play no part."""
    out_features, in_features = weight.shape

    def holds(rule: RowRule) -> bool:
        rows, trial_weight = cancelling_product(out_features, in_features, LARGEST_TRIAL, weight.dtype, weight.device)
        bias = torch.zeros_like(trial_weight[:, 0]) if has_bias else None
        return rows_agree(lambda x: F.linear(x, trial_weight, bias), rule, rows)

    dtype = str(weight.dtype).removeprefix("torch.")
    name = f"linear {out_features}x{in_features} {dtype}{' + bias' * has_bias}"
    return rules.choose(name, linear_candidates(), holds)
