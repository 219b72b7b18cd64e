"""The skeleton on a GPU, without one: paged kernels under Triton's interpreter, graphs on a tape.

Greedy tokens are Hugging Face's, and a row has the same bits in any company, chunk and graph.
"""

import logging
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.worker.decoder.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.attention.kv_cache import KVSpec
from holdfast.worker.attention.trial import rows_agree
from holdfast.worker.decoder.gpu.paged_kernels import PagedKernels, unfit
from holdfast.worker.distributed.tensor_parallel import SingleRank
from holdfast.worker.layers import linear
from holdfast.worker.layers.row_tiles import RowTiles
from holdfast.worker.model import device_skeleton
from holdfast.worker.model.attention_proof import disagreement
from holdfast.worker.model.capture_probe import reason_against_capture
from holdfast.worker.model.device_skeleton import DeviceSkeleton
from holdfast.worker.model.model import RankModel
from holdfast.worker.model.parallel_plan import ParallelPlan
from holdfast.worker.model.parallelize import Target, parallelize
from holdfast.worker.model.skeleton_program import SkeletonProgram
from holdfast.worker.model.weights import ATTENTION, loaded_weights
from tests.parity.families import NOT_RECOGNIZED, SERVED
from tests.worker.decoder.cpu.runs import tokens
from tests.worker.decoder.gpu.runs import Part, batch_of
from tests.worker.decoder.gpu.tape import Tape, TapingDevice
from tests.worker.decoder.gpu.test_whole_step import VIEWS, Operations
from tests.worker.decoder.models import config_of, expected_logits, hugging_face, parallelized

CPU, META = torch.device("cpu"), torch.device("meta")
BLOCK, LENGTH = 16, 128


def some_every_time(names, few):
    return [pytest.param(name, marks=[] if name in few else pytest.mark.slow) for name in sorted(names)]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """As on a GPU: oneDNN packs nothing. Kernels are not compared at each load."""
    monkeypatch.setattr(linear, "_is_packable", lambda weight: False)
    monkeypatch.setattr(device_skeleton, "disagreement", lambda *comparison: None)


@dataclass
class Served:
    """A tiny model as a skeleton program, with a cache full of other sequences' rests."""

    family: str
    on_device: bool = True
    captures: bool = False
    free: list[int] = field(default_factory=lambda: [*range(0, 40, 2), *range(1, 40, 2)])

    def __post_init__(self):
        target = Target(group=SingleRank(), tiles=RowTiles(CPU), device=CPU, dtype=torch.float32)
        model = RankModel(parallelized(config_of(self.family)), target)
        model.settle()
        self.device = TapingDevice(launch)
        side = DeviceSkeleton(
            model,
            target,
            max_positions=LENGTH,
            launch=self.device.launch,
            capture=self.device.capture if self.captures else None,
        )
        self.program = SkeletonProgram(model, target, max_positions=LENGTH, device=side if self.on_device else None)
        self.cache = self.program.allocate_cache(40, BLOCK)
        for layer in self.cache.layers if self.on_device else ():
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)

    def blocks(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // BLOCK))]

    def step(self, *parts: Part) -> list[Tensor]:
        """The logits of all tokens, by sequence."""
        logits = self.program.run(batch_of(parts, BLOCK), with_logits=True).logits
        return list(logits.clone().split([len(part.token_ids) for part in parts]))

    def run(self, ids: list[int], chunks: tuple[int, ...]) -> Tensor:
        """The logits of a sequence, alone in its steps."""
        blocks, rows, first = self.blocks(len(ids)), [], 0
        for size in chunks:
            rows += self.step(Part(first, ids[first : first + size], blocks))
            first += size
        assert first == len(ids)
        return torch.cat(rows)


@pytest.mark.parametrize("family", some_every_time(NOT_RECOGNIZED, ["gpt2"]))
def test_greedy_tokens_are_hugging_faces_and_a_rows_bits_its_own(family):
    """Three sequences packed; then each decodes, padded to a graph's rows; beside one that is alone, in chunks."""
    alone, together, plain = Served(family), Served(family, captures=True), Served(family, on_device=False)
    assert alone.program.numerics == "skeleton-paged-1"
    assert plain.program.numerics == "skeleton"
    together.program.warm_up(4)
    prompts = [tokens(count, seed) for seed, count in enumerate((9, 17, 4))]
    blocks = [together.blocks(len(ids) + 4) for ids in prompts]
    logits = together.step(*(Part(0, ids, table) for ids, table in zip(prompts, blocks, strict=True)))
    rows = [[some] for some in logits]
    texts = [[*ids, int(some[-1].argmax())] for ids, some in zip(prompts, logits, strict=True)]
    for _ in range(2):
        parts = [Part(len(text) - 1, text[-1:], table) for text, table in zip(texts, blocks, strict=True)]
        for text, row, some in zip(texts, rows, together.step(*parts), strict=True):
            row.append(some)
            text.append(int(some.argmax()))
    for ids, text, row in zip(prompts, texts, rows, strict=True):
        ours = torch.cat(row)
        assert torch.equal(alone.run(text[:-1], (len(text) - 5, 3, 1)), ours)
        theirs = expected_logits(config_of(family), torch.tensor(text[:-1]))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
        assert text[len(ids) :] == theirs.argmax(-1)[len(ids) - 1 :].tolist()
        torch.testing.assert_close(plain.run(text[:-1], (len(text) - 1,)), ours, rtol=1e-4, atol=1e-3)
    has_experts = "n_routed_experts" in SERVED.get(family, {}) or "num_local_experts" in SERVED.get(family, {})
    captured = 0 if has_experts or family.startswith("deepseek") else 3
    assert len(together.device.tapes) == captured, "of 1, 2 and 4 rows; on a CPU, experts are called one by one"


def test_a_replayed_step_copies_its_arrays_and_makes_no_tensor(monkeypatch):
    """One copy to the device; the graph does the rest, so nothing is launched and nothing waited for."""
    served = Served("gpt2", captures=True)
    served.program.warm_up(2)
    monkeypatch.setattr(Tape, "replay", lambda tape: None)
    batch = batch_of([Part(4, [5], [1]), Part(7, [6], [2])], BLOCK)
    before = served.program.progress.count
    with Operations() as operations:
        served.program.run(batch, with_logits=True)
    as_numpy = {"to", "resolve_conj", "resolve_neg"}  # of the array on the host
    assert set(operations.names) <= VIEWS | as_numpy | {"copy_"}, operations.names
    assert operations.names["copy_"] == operations.names["to"] == 1
    assert served.program.progress.count > before, "the watchdog sees that steps are run"


def test_a_capture_that_fails_leaves_all_steps_eager(caplog):
    served = Served("gpt2", captures=True)

    def fail(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    served.program._steps._graphs._capture = fail
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        served.program.warm_up(2)
    assert [record.message for record in caplog.records if "without CUDA graphs" in record.message] == [
        "decode steps run without CUDA graphs: a capture failed (operation not permitted when stream is capturing)"
    ]
    ids = tokens(6)
    assert torch.equal(served.run(ids, (5, 1)), Served("gpt2").run(ids, (6,)))


def module_of(family, device):
    """A tiny model's tree on a device, and what its attention gives where each token sees itself alone."""
    module = hugging_face(config_of(family), ATTENTION, torch.bfloat16)
    target = Target(group=SingleRank(), tiles=RowTiles(device), device=device, dtype=torch.bfloat16)
    parallelize(module, ParallelPlan(module.config, module.tp_plan or {}, 1), loaded_weights, target)
    for part in module.modules():
        part.paged_attention = device_skeleton._attend_alone
        part.warn_if_padding_and_no_attention_mask = lambda *arguments: None  # as `RankModel` has it
    return module


def reason_against(family, device):
    module = module_of(family, device)

    def step(token_ids, positions, rows):
        module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)

    return reason_against_capture(step, 8, device)


@pytest.mark.parametrize("family", some_every_time(SERVED, ["gpt2", "deepseek_v3", "phimoe"]))
def test_the_code_of_nearly_all_families_may_be_captured_on_a_gpu(family):
    """On a device without memory, where Hugging Face's grouped experts stay. One family makes a tensor on the host."""
    reason = reason_against(family, META)
    assert reason == ("values go between cpu and meta (aten._to_copy.default)" if family == "phimoe" else None)


def test_code_that_reads_values_may_not_be_captured():
    assert "nonzero" in reason_against("deepseek_v3", CPU)
    zeros = torch.zeros(8)
    steps = {
        "a value is read": lambda ids, positions, rows: zeros[: int(ids.max()) + 1],
        "a size depends on values": lambda ids, positions, rows: zeros[ids == 0],
        "its code does not run (no)": lambda ids, positions, rows: (_ for _ in ()).throw(RuntimeError("no")),
    }
    for expected, step in steps.items():
        assert reason_against_capture(step, 8, CPU).startswith(expected)
    assert reason_against_capture(lambda ids, positions, rows: zeros[ids], 8, CPU) is None


SPEC = KVSpec(num_heads=2, num_kv_heads=1, key_dim=12, value_dim=8, sliding_window=200, softcap=4.0, has_sinks=True)
FEW_ROWS = partial(rows_agree, lengths=(64,), chunks=((1, 1), (3, 2)))


def compared(launch, agree=FEW_ROWS, spec=SPEC):
    def kernels(spec, block_size):
        return PagedKernels([spec], max_positions=1088, block_size=block_size, device=CPU, launch=launch)

    return disagreement(kernels, spec, BLOCK, torch.bfloat16, CPU, agree)


def test_kernels_agree_with_gather_and_sdpa():
    assert compared(launch) is None


def planted(**changes):
    """A launch with a mistake in its arguments."""

    def run(kernel, grid, arguments, **options):
        mistakes = {name: make(arguments[name]) for name, make in changes.items() if name in arguments}
        launch(kernel, grid, {**arguments, **mistakes}, **options)

    return run


@pytest.mark.parametrize(
    ("mistaken", "reason"),
    [
        (planted(scaling=lambda scaling: 1.05 * scaling), "its error is"),
        (planted(WINDOW=lambda window: window - 1), "its error is"),
        (planted(sinks=torch.zeros_like), "its error is"),
        (planted(slots=lambda slots: slots.roll(1)), "other keys or values"),
    ],
)
def test_kernels_with_a_mistake_do_not_serve(mistaken, reason):
    assert compared(mistaken).startswith(reason)


def test_kernels_whose_rows_depend_on_their_company_do_not_serve():
    assert "company" in compared(launch, agree=lambda *trial: False)


def test_gather_and_sdpa_serve_where_the_kernels_do_not(monkeypatch, caplog):
    monkeypatch.setattr(device_skeleton, "disagreement", lambda *comparison: "a reason")
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        served = Served("gpt2", on_device=True)
    assert [record.message for record in caplog.records] == [
        "attention runs on gather and SDPA in place of paged kernels: a reason"
    ]
    assert served.program.numerics == "skeleton"


def test_what_the_kernels_do_not_run_is_refused():
    wide = KVSpec(num_heads=2, num_kv_heads=2, key_dim=264, value_dim=8)
    assert "264 dimensions" in unfit([wide], 16)
    assert "shared by [1, 2]" in unfit([SPEC, KVSpec(num_heads=1, num_kv_heads=1, key_dim=8, value_dim=8)], 16)
    assert "blocks of 48" in unfit([SPEC], 48)
    assert unfit([SPEC], 16) is None
