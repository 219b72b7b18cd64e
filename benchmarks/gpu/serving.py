"""A replica on a GPU: the wait for first tokens, tokens per second under a sustained load, and the GPU's utilization.

    python -m benchmarks.gpu.serving [--model 8b] [--executor auto]

256 requests of 100 to 1,024 tokens in and out, all submitted at once; weights are random. No network, a few minutes.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu import load as loads
from benchmarks.gpu.callers import Callers
from benchmarks.gpu.findings import Findings, Row, machine, parser_of, tell
from benchmarks.gpu.load import LoadSizes, first_row, first_wishes, sustained_row, wishes
from benchmarks.gpu.models import MODELS, save_config
from benchmarks.gpu.utilization import Utilization
from holdfast.worker.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.replica.replica import Replica


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--executor", choices=("auto", "hf"), default="auto")
    options = parser.parse_args()
    sizes = loads.TINY if options.model == "tiny" else LoadSizes()
    tell(measure(options.model, options.device, sizes, options.executor), options.json)


def measure(model: str, device: str, sizes: LoadSizes, executor: str = "auto") -> Findings:
    """Starts a replica in this process, and runs the load on it."""
    with tempfile.TemporaryDirectory() as folder:
        replica = Replica.start(settings(model, device, Path(folder), executor))
    try:
        rows = _rows(model, replica, torch.device(device), sizes)
    finally:
        replica.stop()
    notes = (f"Runs on {replica.info.executor}; rows are {'' if replica.info.row_invariant else 'not '}invariant.",)
    return Findings(
        title=f"Serving {model}, {executor}", machine=machine(torch.device(device)), rows=tuple(rows), notes=notes
    )


def _rows(model: str, replica: Replica, device: torch.device, sizes: LoadSizes) -> list[Row]:
    callers, vocab_size = Callers(replica), MODELS[model][1]["vocab_size"]
    rows: list[Row] = []
    for wanted in first_wishes(sizes, vocab_size):
        rows.append(first_row("holdfast", wanted, [callers.run([wish]) for wish in wanted]))
    load = wishes(sizes, vocab_size)
    with Utilization(device) as utilization:
        took_s = callers.run(load)
    return [*rows, sustained_row("holdfast", load, took_s, utilization.mean)]


def settings(model: str, device: str, folder: Path, executor: str = "auto", num_ranks: int = 1) -> WorkerConfig:
    """A replica with random weights. On a CPU its cache is small."""
    config = WorkerConfig(
        model=ModelConfig.model_validate(
            {"model": str(save_config(model, folder)), "load_format": "dummy", "device": device, "executor": executor}
        ),
        cache=CacheConfig(num_blocks=256 if device == "cpu" else None),
        scheduler=SchedulerConfig(max_num_seqs=256),
    )
    parallel = config.parallel.model_copy(update={"tensor_parallel_size": num_ranks})
    return config.model_copy(update={"parallel": parallel})


if __name__ == "__main__":
    main()
