"""Comparison of what is read of a quantized folder with what is read of the folder of its numbers."""

import json

from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.stated_config import STATED
from tests.fake_group import run_ranks
from tests.worker.models.quantization.folders import Written
from tests.worker.models.test_stated_layout import differences, recognized, stated


def differences_on(written: Written, size: int, dtype: str = "auto") -> list[str]:
    """Between what is read of the quantized folder and of the folder of its numbers."""
    is_stated = json.loads((written.folder / "config.json").read_text())["model_type"] in STATED
    read = stated if is_stated else recognized

    def compared(group: TensorParallelGroup) -> list[str]:
        return differences(read(written.folder, group, dtype), recognized(written.dequantized, group, dtype))

    return [found for rank in run_ranks(size, compared) for found in rank]
