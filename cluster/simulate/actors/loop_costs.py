"""Loop costs: how long the event loops of simulated routers and replicas are busy with a message.

The costs are those of an AVX2 core, rounded. What bounds them is the product's own (`costly_message.py`,
`router_apis.py`).
"""

from dataclasses import dataclass
from typing import Any, Final

from holdfast.router.events import SendAbort, SendSubmit
from holdfast.worker.step_update import StepUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCosts:
    """Seconds."""

    call_s: float = 3e-4
    """Of a router, for each call: reading its headers, admission, its answer."""
    read_s: float = 2e-7
    """Of each time that the scan of a message looks at its bytes."""
    parse_byte_s: float = 8e-9
    """Of each byte that is parsed."""
    delta_s: float = 2e-5
    """Of each delta of a step update, at a router that reads it and at a replica that writes it."""
    reset_s: float = 3e-4
    """Of each stream that is opened and reset at once: 2,383 of them took 0.7 s of a loop."""
    hand_off_s: float = 1e-3
    """Of handing a message to a thread, and of taking the result."""
    switch_s: float = 5e-3
    """Until another thread in Python gives the interpreter's lock to a loop that asks for it."""
    submit_s: float = 1e-4
    """Of a replica, for each request that it is sent, and a tenth of it for each abort."""

    def of_update(self, update: StepUpdate) -> float:
        """At either end of a link."""
        return self.delta_s * (len(update.deltas) + len(update.plain.attempts))

    def at_replica(self, message: Any) -> float:
        """What a router's message costs a replica's loop."""
        match message:
            case SendSubmit():
                return self.submit_s
            case SendAbort():
                return self.submit_s / 10
        return 0.0


FREE: Final = LoopCosts(
    call_s=0.0, read_s=0.0, parse_byte_s=0.0, delta_s=0.0, reset_s=0.0, hand_off_s=0.0, switch_s=0.0, submit_s=0.0
)
"""Of processes whose event loops are never busy."""
