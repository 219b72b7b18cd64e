"""The HF backend on a GPU, without one: paged kernels under Triton's interpreter, graphs on a tape.

Greedy tokens are Hugging Face's, and a row has the same bits in any company, chunk and graph.
"""

import logging
from functools import partial

import pytest
import torch

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.distributed.tensor_parallel import SingleRank
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.gpu.paged_kernels import PagedKernels, unfit
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.models import hf_device_backend
from holdfast.worker.models.gpu_attention_proof import disagreement
from holdfast.worker.models.gpu_attention_trial import rows_agree
from holdfast.worker.models.hf_device_backend import HfDeviceBackend, reason_against_capture
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.parallelize import Target
from tests.draw_params import changed
from tests.parity.families import NOT_RECOGNIZED, SERVED
from tests.worker.executors.cpu.native import library_or_skip
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.gpu.drawn import FILTERS
from tests.worker.executors.gpu.runs import Part, batch_of
from tests.worker.executors.gpu.tape import Tape, TapingDevice
from tests.worker.executors.gpu.test_whole_step import VIEWS, Operations
from tests.worker.executors.models import on_ranks
from tests.worker.models import hf_models
from tests.worker.models.hf_models import BLOCK, check_family, module_of

CPU, META = torch.device("cpu"), torch.device("meta")


def some_every_time(names, few):
    return [pytest.param(name, marks=[] if name in few else pytest.mark.slow) for name in sorted(names)]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Kernels are not compared at each load."""
    monkeypatch.setattr(hf_device_backend, "disagreement", lambda *comparison: None)


Served = partial(hf_models.Served, launch=launch)


def with_graphs(family):
    device = TapingDevice(launch)
    return Served(family, graphs=True, launch=device.launch, capture=device.capture)


@pytest.mark.parametrize("family", some_every_time(NOT_RECOGNIZED, ["gpt2"]))
def test_greedy_tokens_are_hugging_faces_and_a_rows_bits_its_own(family):
    device = TapingDevice(launch)
    together = Served(family, graphs=True, launch=device.launch, capture=device.capture)
    check_family(Served(family), together, Served(family, paged=False))
    has_experts = "n_routed_experts" in SERVED.get(family, {}) or "num_local_experts" in SERVED.get(family, {})
    captured = 0 if has_experts or family.startswith("deepseek") else 3
    assert len(device.tapes) == captured, "of 1, 2 and 4 rows; on a CPU, experts are called one by one"


def test_a_replayed_step_copies_its_arrays_and_makes_no_tensor(monkeypatch):
    """One copy to the device; the graph does the rest, so nothing is launched and nothing waited for."""
    served = with_graphs("gpt2")
    served.backend.warm_up(2)
    monkeypatch.setattr(Tape, "replay", lambda tape: None)
    batch = batch_of([Part(4, [5], [1]), Part(7, [6], [2])], BLOCK)
    before = served.backend.progress.count
    with Operations() as operations:
        served.backend.run(batch, with_logits=True)
    as_numpy = {"to", "resolve_conj", "resolve_neg"}  # of the array on the host
    assert set(operations.names) <= VIEWS | as_numpy | {"copy_"}, operations.names
    assert operations.names["copy_"] == operations.names["to"] == 1
    assert served.backend.progress.count > before, "the watchdog sees that steps are run"


def test_tokens_are_drawn_on_the_device_as_the_native_sampler_draws_them():
    library_or_skip()
    native, served = NativeSampler.with_threads(1), Served("gpt2")
    served.backend.warm_up(2)
    assert served.backend.sampler.numerics == native.numerics
    parts = [Part(0, tokens(3, seed), served.blocks(3)) for seed in range(2)]
    batch = batch_of(parts, BLOCK)
    draws = [changed(each, temperature=1.5, seed=row) for row, each in enumerate([FILTERS["top-p"]] * 6)]
    draws[1] = changed(draws[1], num_logprobs=2)
    output = served.backend.run(batch, with_logits=True)
    kept = HeadOutput(output.logits.clone(), None)
    assert served.backend.sampler.sample(output, draws) == native.sample(kept, draws)
    assert torch.equal(output.logits, kept.logits)
    native.close()


def test_a_capture_that_fails_leaves_all_steps_eager(caplog):
    served = with_graphs("gpt2")

    def fail(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    served.backend._steps._graphs._capture = fail
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        served.backend.warm_up(2)
    assert [record.message for record in caplog.records if "without CUDA graphs" in record.message] == [
        "decode steps run without CUDA graphs: a capture failed (operation not permitted when stream is capturing)"
    ]
    ids = tokens(6)
    assert torch.equal(served.run(ids, (5, 1)), Served("gpt2").run(ids, (6,)))


def reason_against(family, device):
    target = Target(group=SingleRank(), device=device, dtype=torch.bfloat16)
    module = module_of(family, target)
    for part in module.modules():
        part.paged_attention = hf_device_backend._attend_alone
        part.warn_if_padding_and_no_attention_mask = lambda *arguments: None  # as `RankModel` has it

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
    monkeypatch.setattr(hf_device_backend, "disagreement", lambda *comparison: "a reason")
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        served = Served("gpt2")
    assert [record.message for record in caplog.records] == [
        "attention runs on gather and SDPA in place of paged kernels: a reason"
    ]
    assert served.backend.numerics == "hf-3-gather-1"


def test_kernels_that_do_not_run_on_a_device_leave_it_to_gather_and_sdpa(monkeypatch, caplog):
    def fail(*comparison):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(hf_device_backend, "disagreement", fail)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        served = Served("gpt2")
    assert "they do not run here (out of resource: shared memory)" in caplog.text
    assert served.backend.numerics == "hf-3-gather-1"


def test_all_ranks_attend_by_the_same_kernels(monkeypatch):
    """One that may not use the paged ones keeps the others from them."""

    def run(group):
        target = Target(group=group, device=CPU, dtype=torch.float32)
        model = RankModel(module_of("apertus", target), target)
        side = HfDeviceBackend(model, target, max_positions=128, launch=launch)
        monkeypatch.setattr(side, "_compare", lambda block_size: "a reason" if group.rank else None)
        return side._against_kernels(16)

    assert on_ranks(2, run) == ["another rank's kernels do not serve", "a reason"]


def test_what_the_kernels_do_not_run_is_refused():
    wide = KVSpec(num_heads=2, num_kv_heads=2, key_dim=264, value_dim=8)
    assert "264 dimensions" in unfit([wide], 16)
    assert "shared by [1, 2]" in unfit([SPEC, KVSpec(num_heads=1, num_kv_heads=1, key_dim=8, value_dim=8)], 16)
    assert "blocks of 48" in unfit([SPEC], 48)
    assert unfit([SPEC], 16) is None
