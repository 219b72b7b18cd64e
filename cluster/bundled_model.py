"""Finds the model that comes with the package, so that the floors below only ever see folders and hub ids."""

from cluster.demo.bundled import bundled_path
from worker.config import WorkerConfig

BUNDLED = "demo"


def located(config: WorkerConfig) -> WorkerConfig:
    """`config` as it is; for the bundled model, with the folder where it lies on this machine, under its own name."""
    if config.model.model != BUNDLED:
        return config
    name = config.model.served_model_name or BUNDLED
    model = config.model.model_copy(update={"model": str(bundled_path(BUNDLED)), "served_model_name": name})
    return config.model_copy(update={"model": model})
