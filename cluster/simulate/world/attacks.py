"""Attacks of one simulation: many requests of one class that cost a router much, drawn from its seed.

What may not live here: what attackers do (`cluster/simulate/actors/attacker.py`), and what may come of it
(`attack_checks.py`).
"""

import random
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.simulate.actors.attacker import Attacker, CostlyCall, ResetFlood
from holdfast.cluster.simulate.actors.messages import MessageSize
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.kernel.network import Network
from holdfast.cluster.simulate.oracle.pseudo_model import WHOLE_TOKEN_IDS
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams

LARGE_FIELDS: Final = "large fields"
LARGE_TEXTS: Final = "large texts"
COSTLY_GRAMMARS: Final = "costly grammars"
RESETS: Final = "resets"

CLASSES: Final = (LARGE_FIELDS, LARGE_TEXTS, COSTLY_GRAMMARS, RESETS)
"""The classes of requests. Each is allowed by `max_message_bytes` and by nothing else refused before it is read."""

MAX_MESSAGE_BYTES: Final = 32 * 2**20
BYTES_PER_ENTRY: Final = 11
"""Of a map from integers to floats, as it is on the wire."""
SPREAD_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Many requests of one class, at about the same time."""

    kind: str
    time_s: float
    num_calls: int
    """Calls, or connections."""
    size: MessageSize
    num_streams: int
    """That each connection opens and resets."""
    router: int
    seed: int

    def attackers(self, network: Network, routers: list[SimulatedRouter]) -> list[Attacker]:
        if self.kind == RESETS:
            router = routers[self.router]
            return [
                ResetFlood(num_streams=self.num_streams, network=network, router=router) for _ in range(self.num_calls)
            ]
        return [
            CostlyCall(
                request=self._request(number),
                size=self.size,
                ends_reader=False,
                network=network,
                routers=routers,
                at=self.router,
            )
            for number in range(self.num_calls)
        ]

    def _request(self, number: int) -> EngineRequest:
        rng = random.Random(f"attack {self.seed} {number}")
        return EngineRequest(
            request_id=f"attack-{number}",
            prompt_token_ids=tuple(rng.choices(WHOLE_TOKEN_IDS, k=4)),
            sampling_params=SamplingParams(seed=rng.getrandbits(40), max_tokens=2, ignore_eos=True),
            tenant="attacker",
        )


def draw_attack(rng: random.Random, seed: int, span_s: float, num_routers: int) -> Attack | None:
    """In one simulation of three."""
    if rng.random() < 2 / 3:
        return None
    kind = rng.choice(CLASSES)
    return Attack(
        kind=kind,
        time_s=rng.uniform(0.2, span_s),
        num_calls=rng.randint(1, 12),
        size=_draw_size(rng, kind),
        num_streams=rng.choice((1000, 10_000)),
        router=rng.randrange(num_routers),
        seed=seed,
    )


def _draw_size(rng: random.Random, kind: str) -> MessageSize:
    num_bytes = int(MAX_MESSAGE_BYTES * rng.uniform(0.1, 1.0))
    match kind:
        case "large fields":
            return MessageSize(num_bytes=num_bytes, num_entries=num_bytes // BYTES_PER_ENTRY)
        case "large texts":
            return MessageSize(num_bytes=num_bytes)
        case "costly grammars":
            return MessageSize(compile_s=rng.uniform(0.1, 3.0))
    return MessageSize()
