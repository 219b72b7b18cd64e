"""Settings of one model among several that a cluster serves: what differs from the settings of all."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from holdfast.cluster.scaling.demand_book import ScalingConfig
from holdfast.worker.config import (
    CacheConfig,
    HealthConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Settings,
    SpeculationConfig,
)

_OF_CLUSTER: Final = ("replicas", "cpus_per_rank", "rank_resources")
"""Settings of the section `cluster` that an entry may set."""


class ModelEntry(Settings):
    """One model of `cluster.models`. A setting that is not given here is that of all models."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    health: HealthConfig = HealthConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    scaling: ScalingConfig = ScalingConfig()
    replicas: int = Field(1, ge=1, description="number of replicas of this model")
    cpus_per_rank: float = Field(1.0, gt=0, description="as cluster.cpus_per_rank, for this model")
    rank_resources: dict[str, float] = Field({}, description="as cluster.rank_resources, for this model")

    def over(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of all models, as nested mappings, with this entry's own in their places."""
        given = self.model_dump(exclude_unset=True)
        own_cluster = {name: given.pop(name) for name in _OF_CLUSTER if name in given}
        merged = {section: dict(values) for section, values in settings.items()}
        for section, values in (given | {"cluster": own_cluster}).items():
            merged[section] |= values
        return merged


def read_models(value: object) -> object:
    """`"./a,./b"` as entries, and a name among entries as one. Other values are left to the validator."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        return tuple({"model": {"model": entry}} if isinstance(entry, str) else entry for entry in value)
    return value


ModelEntries = Annotated[tuple[ModelEntry, ...], BeforeValidator(read_models)]
