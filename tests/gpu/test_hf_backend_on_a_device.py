"""Models without a native backend on a GPU: paged attention as compiled, real graphs.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

import os

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs a CUDA device, and TRITON_INTERPRET=0", allow_module_level=True)

from holdfast.worker.executors.gpu.paged_kernels import PagedKernels
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.models.gpu_attention_proof import MAX_POSITIONS, disagreement
from holdfast.worker.models.gpu_row_rules import fix_gpu_kernels
from tests.parity.families import NOT_RECOGNIZED
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.gpu.runs import Part
from tests.worker.models.hf_models import Served, check_family

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = torch.device("cuda", 0)


SPECS = {
    "DeepSeek-V2-Lite": KVSpec(num_heads=16, num_kv_heads=16, key_dim=192, value_dim=128),
    "GPT-2": KVSpec(num_heads=12, num_kv_heads=12, key_dim=64, value_dim=64),
    "one KV head": KVSpec(num_heads=48, num_kv_heads=1, key_dim=128, value_dim=128),
    "everything": KVSpec(
        num_heads=8, num_kv_heads=2, key_dim=96, value_dim=80, sliding_window=130, softcap=5.0, has_sinks=True
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _kernels_of_a_rank():
    fix_gpu_kernels()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_paged_kernels_agree_with_gather_and_sdpa_and_keep_rows_apart(spec, dtype):
    """By the comparison of every load."""

    def kernels(spec, block_size):
        return PagedKernels([spec], max_positions=MAX_POSITIONS, block_size=block_size, device=CUDA)

    for block_size in (16, 64):
        assert disagreement(kernels, spec, block_size, dtype, CUDA) is None


@pytest.mark.parametrize("family", sorted(NOT_RECOGNIZED))
def test_greedy_tokens_are_hugging_faces_and_a_rows_bits_its_own(family):
    """Bits where cuBLAS keeps rows apart, and experts are not grouped by torch."""
    alone, together = Served(family, device=CUDA), Served(family, graphs=True, device=CUDA)
    has_experts = any("Experts" in type(part).__name__ for part in alone.backend.model.module.modules())
    same_bits = alone.backend.row_invariant and not has_experts
    check_family(alone, together, Served(family, paged=False, device=CUDA), same_bits=same_bits)


@pytest.mark.parametrize("family", ["gpt2", "opt", "apertus"])
def test_a_graph_gives_the_bits_of_the_eager_step(family):
    """Of as many rows, so that whatever cuBLAS does it does twice."""
    eager, graphs = Served(family, device=CUDA), Served(family, graphs=True, device=CUDA)
    graphs.backend.warm_up(4)
    assert graphs.backend._steps.num_captured == 3
    texts = [tokens(12, seed) for seed in range(4)]
    for served in (eager, graphs):
        tables = [served.blocks(12) for _ in texts]
        served.step(*(Part(0, text[:10], table) for text, table in zip(texts, tables, strict=True)))
        served.seen = [
            served.step(*(Part(at, text[at : at + 1], table) for text, table in zip(texts, tables, strict=True)))
            for at in (10, 11)
        ]
    for left, right in zip(eager.seen, graphs.seen, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
