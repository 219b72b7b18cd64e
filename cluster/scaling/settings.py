"""Settings of the autoscaler. `cluster/config/` loads them, for all models and for each.

What may not live here: what is decided by them (`autoscaler.py`).
"""

from pydantic import Field, model_validator

from holdfast.worker.config import Settings


class ScalingConfig(Settings):
    """How many replicas a model has, by its load. Without `max_replicas` their number is fixed: `cluster.replicas`."""

    max_replicas: int | None = Field(
        None, ge=1, description="replicas of a model at most; unset: as many as `replicas`, whatever the load"
    )
    min_replicas: int = Field(
        1, ge=0, description="replicas of a model at least; 0: an idle model has none, and requests wait for a start"
    )
    target_ttft_s: float = Field(
        2.0, gt=0, description="seconds to the first token that nine of ten requests should keep to"
    )
    target_use: float = Field(
        0.7, gt=0, le=1, description="share of a replica's sequences, KV blocks or prefill time that is used on purpose"
    )
    startup_s: float = Field(
        10.0, gt=0, description="seconds from the decision for a replica until it serves, before any was measured"
    )
    downscale_after_s: float = Field(
        120.0, ge=0, description="seconds for which fewer replicas must have been enough before one is taken away"
    )
    zero_after_s: float = Field(
        600.0, ge=0, description="seconds without a request after which the last replica goes, where min_replicas is 0"
    )
    cold_start_wait_s: float = Field(
        120.0, gt=0, description="seconds that requests wait for the first replica of a model that has none at rest"
    )

    @property
    def is_on(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None

    @property
    def sleeps(self) -> bool:
        """Whether an idle model has no replica."""
        return self.is_on and self.min_replicas == 0

    @model_validator(mode="after")
    def _check_limits(self) -> "ScalingConfig":
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas = {self.max_replicas} must be at least min_replicas = {self.min_replicas}")
        return self
