"""Suspicion levels of a request that may have killed the replicas it ran on, as routers report them to replicas.

What may not live here: the judgement (`router/dispatch/quarantine.py`), and keeping suspects of several routers apart
(`worker/engine_core/suspects.py`).
"""

from enum import IntEnum
from typing import Final

NUM_STEPS_TO_CLEAR: Final = 8
"""Steps with output that clear a suspect. Router and replica count them alike, the router a little later."""


class Suspicion(IntEnum):
    """Level of suspicion at the moment when the request is submitted."""

    NONE = 0
    SUSPECT = 1
    """It has run on replicas that died, and not got on since: if this one dies, it is one too many."""
    ON_TRIAL = 2
    """If this replica dies, this request is the cause: no suspect of another router may run beside it."""
