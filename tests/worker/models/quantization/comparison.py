"""Comparison of what is read of a quantized folder with what is read of the folder of its numbers."""

from tests.worker.models.layouts import differences_of
from tests.worker.models.quantization.folders import Written


def differences_on(written: Written, size: int, dtype: str = "auto") -> list[str]:
    """Between what is read of the quantized folder and of the folder of its numbers."""
    return differences_of(written.folder, written.dequantized, size, dtype)
