"""Registry of the batching policies that a setting can name. What may not live here: the policies themselves."""

from collections.abc import Mapping
from typing import Final

from holdfast.worker.scheduling.batching import ContinuousBatching, MakePolicy
from holdfast.worker.scheduling.memory_aware_batching import MemoryAwareBatching

POLICIES: Final[Mapping[str, MakePolicy]] = {"continuous": ContinuousBatching, "memory_aware": MemoryAwareBatching}
"""By `SchedulerConfig.policy`."""
