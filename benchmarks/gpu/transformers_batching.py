"""The same load on transformers' own continuous batching: what Hugging Face's code does by itself on this GPU.

    python -m benchmarks.gpu.transformers_batching [--model 8b]

Compare with `benchmarks.gpu.serving`. Weights are random; attention is torch's over pages. No network, a few minutes.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu import load as loads
from benchmarks.gpu.callers import LIMIT_S
from benchmarks.gpu.findings import Findings, Row, machine, parser_of, tell
from benchmarks.gpu.load import LoadSizes, Wish, first_row, first_wishes, sustained_row, wishes
from benchmarks.gpu.models import MODELS, config_of
from benchmarks.gpu.utilization import Utilization

_PAGE_SIZE = 256


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cache-tokens", type=int, default=400_000, help="tokens that its cache holds")
    options = parser.parse_args()
    sizes = loads.TINY if options.model == "tiny" else LoadSizes()
    tell(measure(options.model, torch.device(options.device), sizes, options.cache_tokens), options.json)


def measure(model: str, device: torch.device, sizes: LoadSizes, cache_tokens: int) -> Findings:
    """Loads the model with random weights, and runs the load on it."""
    from transformers import AutoModelForCausalLM, __version__

    torch.set_grad_enabled(False)
    with device:
        made = AutoModelForCausalLM.from_config(config_of(model), dtype=torch.bfloat16, attn_implementation="sdpa")
    manager = _manager(made.eval(), cache_tokens, on_gpu=device.type == "cuda")
    vocab_size = MODELS[model][1]["vocab_size"]
    rows: list[Row] = []
    try:
        for wanted in first_wishes(sizes, vocab_size):
            rows.append(first_row("transformers", wanted, [_run(manager, [wish]) for wish in wanted]))
        load = wishes(sizes, vocab_size)
        with Utilization(device) as utilization:
            took_s = _run(manager, load)
        rows.append(sustained_row("transformers", load, took_s, utilization.mean))
    finally:
        manager.stop(block=True)
    notes = (f"transformers {__version__}, CUDA graphs as it has them by itself.",)
    return Findings(
        title=f"Continuous batching of transformers, {model}", machine=machine(device), rows=tuple(rows), notes=notes
    )


def _manager(model: Any, cache_tokens: int, *, on_gpu: bool) -> Any:
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    batching = ContinuousBatchingConfig(
        num_blocks=cache_tokens // _PAGE_SIZE,
        page_size=_PAGE_SIZE,
        max_batch_tokens=2048,
        max_requests_per_batch=256,
        use_cuda_graph=None if on_gpu else False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
    manager.start()
    return manager


def _run(manager: Any, load: Sequence[Wish]) -> float:
    """Seconds from the first submission to the last token. Raises RuntimeError where a request fails or is cut."""
    started_s = time.perf_counter()
    left = {
        manager.add_request(list(wish.prompt), max_new_tokens=wish.num_tokens, eos_token_id=-1): wish.num_tokens
        for wish in load
    }
    while left:
        result = manager.get_result(timeout=1)
        if result is None and (not manager.is_running() or time.perf_counter() - started_s > LIMIT_S):
            raise RuntimeError(f"transformers has stopped with {len(left)} requests open")
        if result is not None and result.error:
            raise RuntimeError(f"transformers: {result.error}")
        if result is not None and result.is_finished():
            wanted = left.pop(result.request_id)
            if len(result.generated_tokens) != wanted:
                raise RuntimeError(f"transformers gave {len(result.generated_tokens)} tokens of {wanted}")
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
