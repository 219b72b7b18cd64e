"""Loop costs of a simulated router: how long its event loop is busy with a message, and what it decodes elsewhere.

The costs are those of routers on an AVX2 core, rounded. What may not live here: when a callback runs
(`cluster/simulate/kernel/event_loop.py`).
"""

from dataclasses import dataclass
from typing import Final

from holdfast.cluster.simulate.actors.messages import Generate, MessageSize, Resets
from holdfast.worker.step_update import StepUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCosts:
    """Seconds of a router's event loop, and the bounds that keep them small."""

    call_s: float = 3e-4
    """Of each call: reading its headers, admission, its answer."""
    byte_s: float = 2e-8
    """Of each byte that is decoded."""
    entry_s: float = 1.25e-6
    """Of each entry of a map or list that is checked: 2.9 million of them held a loop for 3.6 s."""
    delta_s: float = 2e-5
    """Of each delta of a step update."""
    reset_s: float = 1e-4
    """Of each stream that is opened and reset at once: 100,000 of them held a loop for 10 s."""
    hand_off_s: float = 1e-3
    """Of handing a message to a thread, and of taking the result: the thread holds the interpreter for as long."""
    max_entries: int | None = 4096
    """A field with more is refused once so many have been counted; None: all are built first."""
    inline_bytes: int | None = 64 * 2**10
    """Larger messages are decoded on a thread; None: on the loop."""
    max_resets: int | None = 100
    """A connection that resets more streams is cut off; None: it is not."""

    def on_loop_s(self, message: object) -> float:
        """What a message costs before it takes effect."""
        match message:
            case Generate():
                return self.call_s + self._decoding_on_loop_s(message.size)
            case StepUpdate():
                return self.delta_s * (len(message.deltas) + len(message.plain.attempts))
            case Resets():
                return self.reset_s * message.num_streams
        return 0.0

    def on_thread_s(self, size: MessageSize) -> float:
        """What decoding, and compiling a grammar, cost beside the loop."""
        return size.compile_s + (self._decoding_s(size) if self._goes_to_a_thread(size) else 0.0)

    def is_refused(self, size: MessageSize) -> bool:
        """Whether a message exceeds its bounds. Without bounds one is refused as well, after it has been built."""
        return size.num_entries > (self.max_entries or DEFAULT_MAX_ENTRIES)

    def _decoding_on_loop_s(self, size: MessageSize) -> float:
        return self.hand_off_s if self._goes_to_a_thread(size) else self._decoding_s(size)

    def _decoding_s(self, size: MessageSize) -> float:
        num_entries = size.num_entries if self.max_entries is None else min(size.num_entries, self.max_entries)
        return size.num_bytes * self.byte_s + num_entries * self.entry_s

    def _goes_to_a_thread(self, size: MessageSize) -> bool:
        return self.inline_bytes is not None and size.num_bytes > self.inline_bytes


DEFAULT_MAX_ENTRIES: Final = 4096

FREE: Final = LoopCosts(call_s=0.0, byte_s=0.0, entry_s=0.0, delta_s=0.0, reset_s=0.0, hand_off_s=0.0)
"""Of a router whose event loop is never busy."""

UNBOUNDED: Final = LoopCosts(max_entries=None, inline_bytes=None, max_resets=None)
"""Of a router that builds whatever it is sent on its event loop."""
