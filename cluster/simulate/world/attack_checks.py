"""Promises about an attack: how many processes it ends, what one of its messages costs, how long streams pause.

What may not live here: attacks (`attacks.py`).
"""

from collections.abc import Sequence
from typing import Final

from holdfast.cluster.simulate.actors.attacker import Attacker
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.actors.router_doors import HANDED_OVER
from holdfast.cluster.simulate.kernel.promises import require
from holdfast.cluster.simulate.world.attacks import CRASHES, ENDS, HANGS, OUT_OF_MEMORY, Attack
from holdfast.router.config import LimitsConfig
from holdfast.router.security.rates import BURST_S

MAX_DECODING_S: Final = 0.15
"""Of a router's interpreter, for one message: as much as a million token ids take, or half a megabyte of text."""
MAX_PAUSE_S: Final = 0.1
"""99 of 100 step updates that come during an attack wait for their router no longer."""
PERCENTILE: Final = 0.99


def most_ended(attack: Attack, num_routers: int) -> int:
    """How many processes the requests of an attack may end.

    The first crash proves nothing: a router that is killed while it reads an honest request looks the same. A hang is
    proof to whoever sees the process end, so another router is needed. A router that is out of memory says so itself.
    """
    most = {CRASHES: 2, HANGS: 1 if num_routers > 1 else 2, OUT_OF_MEMORY: 1}
    return most.get(attack.kind, 0)


def check_ended(attack: Attack, routers: Sequence[SimulatedRouter]) -> None:
    """Checks how many processes its requests ended. Without faults no other reason is left."""
    num_ended, most = sum(router.num_hung + router.num_crashed for router in routers), most_ended(attack, len(routers))
    require(num_ended <= most, f"{attack.kind} ended {num_ended} processes, and {most} would be the most")


def check_decoding(attack: Attack, routers: Sequence[SimulatedRouter]) -> None:
    """Checks that no message of its cost more than its bounds allow."""
    longest_s = max(router.longest_decoding_s for router in routers)
    require(longest_s <= MAX_DECODING_S, f"{attack.kind}: one message took {longest_s:.3f} s of an interpreter")


def check_resets(attack: Attack, routers: Sequence[SimulatedRouter], limits: LimitsConfig, end_s: float) -> None:
    """Checks that who resets too many calls was cut off: of calls by nobody knows whom, and of the attackers' address,
    a router looks at no more than their budgets, and at those that it is handed before a connection is closed.
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
