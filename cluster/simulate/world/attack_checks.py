"""Promises about an attack: how many processes it ends, and how long the streams beside it pause.

What may not live here: attacks (`attacks.py`).
"""

from collections.abc import Sequence
from typing import Final

from holdfast.cluster.simulate.actors.attacker import Attacker
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.kernel.promises import require
from holdfast.cluster.simulate.world.attacks import Attack

MAX_ENDED: Final = 1
"""Processes that a class of requests ends at most."""
MAX_PAUSE_S: Final = 0.1
"""99 of 100 step updates that come during an attack wait for their router no longer."""
PERCENTILE: Final = 0.99


def check_ended(attack: Attack, routers: Sequence[SimulatedRouter]) -> None:
    """Checks that its requests ended at most one process. Without faults no other reason is left for a hang."""
    num_ended = sum(router.num_hung + router.num_crashed for router in routers)
    require(num_ended <= MAX_ENDED, f"{attack.kind} ended {num_ended} processes, and {MAX_ENDED} is too many already")


def check_pauses(
    attack: Attack, attackers: Sequence[Attacker], routers: Sequence[SimulatedRouter], end_s: float
) -> None:
    """Checks that streams went on beside it, until `end_s`, when its last request was over."""
    require(all(attacker.is_over for attacker in attackers), f"{attack.kind}: some were never answered")
    waits_s = sorted(
        wait.wait_s for router in routers for wait in router.update_waits if attack.time_s <= wait.at_s <= end_s
    )
    pause_s = waits_s[int(PERCENTILE * len(waits_s))] if waits_s else 0.0
    require(pause_s < MAX_PAUSE_S, f"{attack.kind}: streams paused for {pause_s:.3f} s")
