"""How far a request is under suspicion of killing the replicas that run it: what routers tell replicas of it.

What may live here: the words. What may not: who judges (`router/dispatch/quarantine.py`) and who keeps suspects apart
(`suspects.py`).
"""

from enum import IntEnum
from typing import Final

NUM_STEPS_TO_CLEAR: Final = 8
"""Steps with output that clear a suspect. Router and replica count them alike, the router a little later."""


class Suspicion(IntEnum):
    """As of the moment when the request is submitted."""

    NONE = 0
    SUSPECT = 1
    """It has run on replicas that died, and not got on since: if this one dies, it is one too many."""
    ON_TRIAL = 2
    """If this replica dies, it is the culprit: no suspect of another router may run beside it."""
