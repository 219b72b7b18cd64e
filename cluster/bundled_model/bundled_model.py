"""Finds the models that come with the package, so that the floors below only ever see folders and hub ids."""

from holdfast.cluster.bundled_model.folders import bundled_path
from holdfast.worker.config import WorkerConfig

BUNDLED = "demo"
BUNDLED_DRAFT = "demo-draft"


def located(config: WorkerConfig) -> WorkerConfig:
    """`config` as it is; for the bundled model, with the folder where it lies on this machine, under its own name.

    The bundled draft model is found in the same way, and is the bundled model's where the settings name none.
    """
    draft = config.speculation.draft_model or (BUNDLED_DRAFT if config.model.model == BUNDLED else None)
    if draft == BUNDLED_DRAFT:
        speculation = config.speculation.model_copy(update={"draft_model": str(bundled_path(BUNDLED_DRAFT))})
        config = config.model_copy(update={"speculation": speculation})
    if config.model.model != BUNDLED:
        return config
    name = config.model.served_model_name or BUNDLED
    model = config.model.model_copy(update={"model": str(bundled_path(BUNDLED)), "served_model_name": name})
    return config.model_copy(update={"model": model})
