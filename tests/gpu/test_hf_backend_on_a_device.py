"""Models without a native backend on a GPU: products, experts and paged attention as compiled, real graphs.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

import os

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs a CUDA device, and TRITON_INTERPRET=0", allow_module_level=True)

from holdfast.worker.executors.gpu.launches import triton_launch
from holdfast.worker.executors.gpu.products import RowFunctions
from tests.parity.families import NOT_NATIVE
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.gpu.cancelling import cancelling_product
from tests.worker.executors.steps import Part
from tests.worker.models.hf_models import Served, check_family

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("length", [128, 4096, 8192])
def test_a_row_has_the_same_mean_in_any_company(length):
    rows, _ = cancelling_product(1, length, 2048, torch.float32, CUDA)
    with RowFunctions(triton_launch, CUDA):
        together = rows.mean(-1)
        for count in (1, 2, 3, 16, 100, 2047):
            assert torch.equal(rows[:count].mean(-1), together[:count])


@pytest.mark.parametrize("family", sorted(NOT_NATIVE))
def test_greedy_tokens_are_hugging_faces_and_a_rows_bits_its_own(family):
    check_family(Served(family, device=CUDA), Served(family, graphs=True, device=CUDA))


@pytest.mark.parametrize("family", ["gpt2", "opt", "apertus"])
def test_a_graph_gives_the_bits_of_the_eager_step(family):
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
