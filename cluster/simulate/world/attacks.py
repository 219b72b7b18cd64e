"""Attacks of one simulation: many requests of one class that cost a router much, or end it, drawn from its seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.simulate.actors.attacker import Attacker, CostlyCall, ResetFlood
from holdfast.cluster.simulate.actors.costly_message import (
    BIAS_BYTES,
    CostlyMessage,
    End,
    with_logit_bias,
    with_text,
    with_token_ids,
)
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.actors.router_apis import HANDED_OVER
from holdfast.cluster.simulate.kernel.network import Network
from holdfast.cluster.simulate.kernel.timeline import require
from holdfast.cluster.simulate.oracle.pseudo_model import WHOLE_TOKEN_IDS
from holdfast.router.config import LimitsConfig
from holdfast.router.token_bucket import BURST_S
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.message_bounds import MAX_FIELDS

LARGE_FIELDS: Final = "large fields"
TOKEN_LISTS: Final = "token lists"
LARGE_TEXTS: Final = "large texts"
COSTLY_GRAMMARS: Final = "costly grammars"
RESETS: Final = "resets"
CRASHES: Final = "crashes"
HANGS: Final = "hangs"
OUT_OF_MEMORY: Final = "out of memory"
MANY_BYTES: Final = "many bytes"

ENDS: Final = {CRASHES: End.CRASH, HANGS: End.HANG, OUT_OF_MEMORY: End.NO_MEMORY}
"""Ends of requests that end their reader. All calls of an attack have the same bytes."""
CLASSES: Final = (LARGE_FIELDS, TOKEN_LISTS, LARGE_TEXTS, COSTLY_GRAMMARS, MANY_BYTES, RESETS, *ENDS)
"""The classes of requests. Each is allowed by `limits.max_message_bytes`."""

SPREAD_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Many requests of one class, at about the same time."""

    kind: str
    time_s: float
    num_calls: int
    """Calls, or connections."""
    num_bytes: int
    """Bytes of a call."""
    compile_s: float
    """Seconds to compile its grammar."""
    num_streams: int
    """Streams that each connection opens and resets."""
    router: int
    seed: int

    def attackers(self, network: Network, routers: list[SimulatedRouter]) -> list[Attacker]:
        """Processes of the attack, which begin with the simulation."""
        if self.kind == RESETS:
            router = routers[self.router]
            return [
                ResetFlood(num_streams=self.num_streams, network=network, router=router) for _ in range(self.num_calls)
            ]
        message = self._message()
        return [
            CostlyCall(
                request=self._request(number),
                message=message,
                is_of_gateway=number % 2 == 1,
                network=network,
                routers=routers,
                at=self.router,
            )
            for number in range(self.num_calls)
        ]

    def _message(self) -> CostlyMessage:
        match self.kind:
            case "large fields":
                return with_logit_bias(self.num_bytes)
            case "token lists":
                return with_token_ids(self.num_bytes)
            case "many bytes":
                return with_token_ids(4 * 2**20, token_id=2**22)
            case "large texts":
                return with_text(self.num_bytes)
        return with_text(64, ENDS.get(self.kind), self.compile_s)

    def _request(self, number: int) -> EngineRequest:
        rng = random.Random(f"attack {self.seed} {number}")
        return EngineRequest(
            request_id=f"attack-{number}",
            prompt_token_ids=tuple(rng.choices(WHOLE_TOKEN_IDS, k=4)),
            sampling_params=SamplingParams(seed=rng.getrandbits(40), max_tokens=2, ignore_eos=True),
            tenant="attacker",
        )


def draw_attack(rng: random.Random, seed: int, span_s: float, num_routers: int, limits: LimitsConfig) -> Attack | None:
    """An attack in one simulation of three. Messages have any size that is let in, on a scale of powers."""
    if rng.random() < 2 / 3:
        return None
    kind = rng.choice(CLASSES)
    most = limits.max_message_bytes - 2**10
    num_bytes = int(most ** rng.uniform(0.7, 1.0))
    if kind in (LARGE_FIELDS, TOKEN_LISTS) and rng.random() < 0.5:  # the number that other bounds admit
        num_bytes = BIAS_BYTES * (MAX_FIELDS // 3 - 2) if kind == LARGE_FIELDS else limits.max_prompt_tokens
    return Attack(
        kind=kind,
        time_s=rng.uniform(0.2, span_s),
        num_calls=rng.randint(300, 400) if kind == MANY_BYTES else rng.randint(1, 12),
        num_bytes=num_bytes,
        compile_s=rng.uniform(0.1, 3.0) if kind == COSTLY_GRAMMARS else 0.0,
        num_streams=rng.choice((1000, 100_000)),
        router=rng.randrange(num_routers),
        seed=seed,
    )


MAX_DECODING_S: Final = 0.15
"""Most seconds of a router's interpreter for one message: a million token ids, or half a megabyte of text."""
MAX_PAUSE_S: Final = 0.1
"""99 of 100 step updates that come during an attack wait for their router no longer."""
PERCENTILE: Final = 0.99  # quantile of the pauses


def most_ended(attack: Attack, num_routers: int) -> int:
    """Processes that the requests of an attack may end, at most.

    The first crash proves nothing: a router that is killed while it reads an honest request looks the same. A hang is
    proof to the process that sees it end, so another router is needed. A router that is out of memory says so itself.
    Several callers can crash one more: two routers may be reading the request when the end of the first is seen.
    """
    most = {CRASHES: 2 if attack.num_calls == 1 else 3, HANGS: 1 if num_routers > 1 else 2, OUT_OF_MEMORY: 1}
    return most.get(attack.kind, 0)


def check_ended(attack: Attack, routers: Sequence[SimulatedRouter]) -> None:
    """Checks the number of processes that its requests ended. Without faults there is no other reason."""
    num_ended, most = sum(router.num_hung + router.num_crashed for router in routers), most_ended(attack, len(routers))
    require(num_ended <= most, f"{attack.kind} ended {num_ended} processes, and {most} would be the most")


def check_decoding(attack: Attack, routers: Sequence[SimulatedRouter]) -> None:
    """Checks that no message of its cost more than its bounds allow."""
    longest_s = max(router.longest_decoding_s for router in routers)
    require(longest_s <= MAX_DECODING_S, f"{attack.kind}: one message took {longest_s:.3f} s of an interpreter")


def check_resets(attack: Attack, routers: Sequence[SimulatedRouter], limits: LimitsConfig, end_s: float) -> None:
    """Checks that clients with too many resets were cut off: a router looks only at the calls that the budgets of
    anonymous callers and of the attackers' address allow, and at the calls that arrive before a connection is closed.
    """
    num_looked_at, seconds = sum(router.num_resets for router in routers), BURST_S + end_s - attack.time_s
    most = 2 * limits.max_resets_per_s * seconds + 10 * HANDED_OVER * attack.num_calls
    require(num_looked_at <= most, f"{attack.kind}: routers looked at {num_looked_at} calls, of {most:.0f} at most")


def check_pauses(
    attack: Attack, attackers: Sequence[Attacker], routers: Sequence[SimulatedRouter], end_s: float
) -> None:
    """Checks that streams went on beside it, until `end_s`, when its last request was over. Those of a router that it
    ends go on at another one, after a pause that is not the loop's.
    """
    require(all(attacker.is_over for attacker in attackers), f"{attack.kind}: some were never answered")
    if attack.kind in ENDS:
        return
    waits_s = sorted(
        wait.wait_s for router in routers for wait in router.update_waits if attack.time_s <= wait.at_s <= end_s
    )
    pause_s = waits_s[int(PERCENTILE * len(waits_s))] if waits_s else 0.0
    require(pause_s < MAX_PAUSE_S, f"{attack.kind}: streams paused for {pause_s:.3f} s")
