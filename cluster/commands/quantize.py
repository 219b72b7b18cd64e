"""Command `holdfast quantize`: a plain checkpoint, quantized into a new folder in compressed-tensors."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.process_memory import readable_bytes


def quantize(
    model: Annotated[str, Parameter(name="IN", help="a Hugging Face folder or a hub id, not quantized")],
    out: Annotated[Path, Parameter(help="folder to create; it must not exist yet")],
    /,
    *,
    scheme: Annotated[
        Literal["int4", "int8", "fp8", "w8a16"],
        Parameter(help="int4: W4A16 in groups of 32; int8: W8A8; fp8: W8A8; w8a16: int8's codes, packed"),
    ] = "int4",
) -> int:
    """Quantize a plain checkpoint into a new folder in compressed-tensors, which vLLM loads as well.

    Serving the folder gives the bits of serving the checkpoint with --quantization. It appears when it is complete.
    """
    from holdfast.cluster.bundled_model.bundled_model import located
    from holdfast.cluster.progress_bars import progress
    from holdfast.worker.config import ModelConfig, WorkerConfig
    from holdfast.worker.models.quantized_folder import write_quantized
    from holdfast.worker.models.weight_files import weight_files
    from holdfast.worker.models.weights import resolve_model

    out = out.expanduser().absolute()
    if out.exists():
        raise ConfigurationError(f"OUT = {str(out)!r}: it is there already; name a folder that is not")
    folder = resolve_model(located(WorkerConfig(model=ModelConfig(model=model))).model.model, setting="IN")
    before = sum(path.stat().st_size for path in weight_files(folder))
    with progress(sys.stderr) as report:
        num_bytes = write_quantized(folder, out, scheme, report)
    print(f"{out}: {scheme}, {readable_bytes(num_bytes)} of weights, of {readable_bytes(before)}")
    return 0
