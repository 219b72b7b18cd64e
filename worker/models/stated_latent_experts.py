"""Mixtures whose experts have rows of another size than the hidden ones (Nemotron 3 Super), as parts of a layout.

Ranks share the experts' outputs, not their inner features: each then has a part of a row's whole sum, which the product
that makes a hidden row of it takes as its share of the inputs. So the first products are whole on every rank, and the
bits are the same on any number of ranks.
"""

from dataclasses import replace
from typing import Any

from holdfast.worker.executors.layout import Activation, Mlp
from holdfast.worker.executors.linears import Linear
from holdfast.worker.models.family import Moe, is_set
from holdfast.worker.models.rank_share import RankShare, joined
from holdfast.worker.models.stated_config import NotStated


class LatentExperts:
    """Builds the experts of one mixture, without gates, whose tensors have names with this prefix."""

    def __init__(self, share: RankShare, moe: Moe, prefix: str, latent: int) -> None:
        """`latent`: the size of a row."""
        self._share, self._moe, self._prefix, self._latent = share, moe, prefix, latent
        self._hidden = share.config.hidden_size
        self._has_bias = is_set(share.family.mlp_bias, share.config)
        if share.family.has_gate:
            raise NotStated("its experts have gates and inputs of another size")

    def input(self) -> Linear:
        """Makes rows of hidden ones."""
        shape = (self._latent, self._hidden)
        return self._share.whole(f"{self._prefix}fc1_latent_proj", shape, has_bias=self._has_bias)

    def experts(self, count: int, activation: Activation) -> tuple[Mlp, ...]:
        """Experts whose `down` has this rank's outputs."""
        prefix, share, latent = f"{self._prefix}experts.", self._share, self._latent
        inner = getattr(share.config, self._moe.inner)
        ups: Any = share.tensors.find(f"{prefix}up_proj", (count, inner, latent))
        downs: Any = None if ups is None else share.tensors.take(f"{prefix}down_proj", (count, latent, inner))
        up_name, down_name = self._moe.parts
        experts = []
        for number in range(count):
            if ups is None:
                up = share.whole(f"{prefix}{number}.{up_name}", (inner, latent))
                down = share.columns([f"{prefix}{number}.{down_name}"], [(latent, None)], inner, has_bias=False)
            else:
                up = Linear(weights=(share.numbers(ups[number]),))
                down = Linear(weights=(share.numbers(downs[number].narrow(0, *share.part(latent))),))
            experts.append(Mlp(activation=activation, has_gate=False, up=up, down=down, num_slices=1))
        return tuple(experts)

    def with_sum(self, shared: Mlp | None) -> Mlp:
        """The MLP that all rows go through, whose `down` takes the experts' sum too."""
        if shared is None:
            raise NotStated("its experts have inputs of another size, and there is no shared expert beside them")
        share, slices = self._share, shared.num_slices
        if share.part(self._latent)[1] % slices:
            raise NotStated(f"rows of {self._latent} numbers of its experts are not cut into {slices} slices")
        shape = (self._hidden, self._latent)
        back = share.rows(f"{self._prefix}fc2_latent_proj", shape, slices, has_bias=self._has_bias, may_stay=False)
        down = joined((back, shared.down), slices, share.dtype)
        return replace(shared, down=down)
