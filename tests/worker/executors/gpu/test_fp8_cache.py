"""Whole models whose keys and values are in fp8: their error, their bits, and requests that go on after a cut."""

from collections import defaultdict
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.worker.config import SchedulerConfig, WorkerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.executors.gpu.executor import NUMERICS, GpuExecutor
from holdfast.worker.executors.gpu.weights import unfit
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models import native_backend as backend
from holdfast.worker.models.loading import LoadedModel
from holdfast.worker.models.model import register_attention
from holdfast.worker.models.native_backend import NativeBackend
from holdfast.worker.models.reference import Reference
from holdfast.worker.models.weights import ATTENTION
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import BlockCopy
from tests.worker.engine.turns import INFO
from tests.worker.engine.two_plans import make_request
from tests.worker.executors import models
from tests.worker.executors.cpu.runs import layout_of, tokens
from tests.worker.executors.gpu import runs
from tests.worker.executors.gpu.runs import Fp8Reference
from tests.worker.executors.gpu.test_executor import size_of
from tests.worker.executors.models import MODELS, config_of, expected_logits, on_ranks
from tests.worker.executors.steps import Part

TEXT = """Each request goes to one replica, and a replica that is lost takes no request with it: the router keeps what \
was said so far, and another replica goes on from there. A token depends on the model and on the request alone, \
whatever else is in the batch, and so the client sees a pause and nothing else. Prefixes are kept in blocks."""

BF16, F32 = torch.bfloat16, torch.float32
Runner = partial(runs.Runner, launch=launch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("model", MODELS)
def test_the_error_of_a_family_is_that_of_its_keys_and_values_in_fp8(model, dtype):
    """In one piece and in chunks: equal bits. In float32 hardly anything else is rounded."""
    layout = layout_of(model, dtype)
    if reason := unfit(layout, 1, 16):
        pytest.skip(reason)
    ids = tokens(18)
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids))
    rounded = Fp8Reference(layout, rounds=True).run_model(torch.tensor(ids))
    runner = Runner(layout, block_size=16, in_fp8=True)
    logits = runner.run(ids)
    error, rounding = (size_of(x.double() - exact) for x in (logits, rounded))
    assert 0 < error <= 1.5 * rounding, (error, rounding)
    assert torch.equal(runner.run(ids, (13, 1, 2)), logits)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 60])
def test_a_model_differs_from_hugging_face_by_what_fp8_costs(count):
    """In float32, so that nothing but keys and values is rounded, and with random weights: the median error of a row is
    below 5% of its logits.
    """
    config, ids = config_of("llama", max_position_embeddings=runs.MAX_POSITIONS), tokens(count)
    expected = expected_logits(config, torch.tensor(ids))
    layout = layout_of("llama", F32)
    found = Runner(layout, in_fp8=True).run(ids)
    error = size_of(found - expected) / size_of(expected)
    assert 1e-3 < error < 0.05, error
    of_reference = Fp8Reference(layout).run_model(torch.tensor(ids))
    assert size_of(found - of_reference) < 0.1 * size_of(found - expected), "but for numbers that lie between two codes"


@pytest.mark.slow
def test_the_bundled_model_hardly_changes_its_mind():
    """A trained model of 3.8 million parameters: its distributions with keys and values in fp8 are less than 0.01 nats
    from those in float64, and the best token is another one at few positions.
    """
    folder = located(WorkerConfig()).model.model
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, attn_implementation=ATTENTION)
    layout = models.layout_of_module(model, SingleRank())
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])
    exact, small = (
        reference.run_model(ids).double().log_softmax(-1)
        for reference in (Reference(layout, dtype=torch.float64), Fp8Reference(layout, rounds=True))
    )
    assert len(ids) > 60
    assert 1e-4 < (exact.exp() * (exact - small)).sum(-1).mean() < 0.01
    assert (exact.argmax(-1) == small.argmax(-1)).float().mean() > 0.9


class Recorder:
    """The tokens of requests by their places in the whole output."""

    def __init__(self) -> None:
        self.tokens = defaultdict(dict)

    def on_update(self, update) -> None:
        assert not update.rejections
        for delta in update.deltas:
            places = range(delta.first_token_index, delta.first_token_index + len(delta.token_ids))
            self.tokens[delta.attempt].update(zip(places, delta.token_ids, strict=True))

    def on_failure(self, error) -> None:
        raise error


@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one():
    """A row belongs to one head, and so to one rank. The leader alone has logits."""
    config, ids = config_of("llama", num_attention_heads=8, num_key_value_heads=4), tokens(12)

    def run(group):
        layout = models.layout_of(config, group, BF16)
        return Runner(layout, group=group, in_fp8=True).run(ids, (7, 5))

    (alone,) = on_ranks(1, run)
    leader, other = on_ranks(2, run)
    assert torch.equal(leader, alone)
    assert other.numel() == 0


class Engines:
    """Replicas of one model, one after the other, each with an engine and a cache of its own."""

    def __init__(self, num_blocks: int = 32) -> None:
        self._num_blocks = num_blocks
        self._layout = layout_of("llama", changes=(("num_hidden_layers", 1),))

    def told(self, requests) -> dict[object, dict[int, int]]:
        """The tokens that a new replica gives these requests, which come at once."""
        runner = Runner(self._layout, num_blocks=self._num_blocks, block_size=16, in_fp8=True)
        info = replace(INFO, block_size=16, num_blocks=self._num_blocks)
        loaded = LoadedModel(
            backend=NativeBackend(runner.executor), cache=runner.cache, info=info, draft=None, pooler=None
        )
        model = ModelRunner(loaded, WorkerConfig(), SingleRank(), torch.device("cpu"))
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12)
        sizes = {"num_blocks": self._num_blocks, "block_size": 16, "max_model_len": 100}
        scheduler = Scheduler(config, **sizes, eos_token_ids=frozenset())
        engine, listener = Engine(scheduler, LeaderRunner(model, SingleRank()), idle_s=0.0), Recorder()
        engine.attach(listener)
        for request in requests:
            engine.submit(request, listener)
        for _ in range(200):
            engine._take_commands()
            engine._turn()
            if not engine.has_work:
                break
        assert not engine.has_work
        assert scheduler.stats().num_used_blocks == 0
        return dict(listener.tokens)


WISHES = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.7})
REQUESTS = [
    make_request(f"r{number}", **{"prompt": tokens(length, number), "max_tokens": 6, **wish})
    for number, (length, wish) in enumerate(zip((12, 4, 20), WISHES, strict=True))
]


@cache
def uninterrupted() -> dict[object, dict[int, int]]:
    whole = Engines().told(REQUESTS)
    assert [sorted(message) for message in whole.values()] == [list(range(6))] * 3
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(3, 5, 2), (5, 1, 4)])
def test_a_request_that_is_cut_goes_on_elsewhere_as_if_it_had_not_been(cuts):
    """Greedy and drawn, cut within a block and beyond one, in other company and with other chunks of the prompt."""
    whole = uninterrupted()
    rest = [
        replace(request, output_token_ids=tuple(whole[request.request_id][place] for place in range(cut)))
        for request, cut in zip(REQUESTS, cuts, strict=True)
    ]
    found = Engines().told(rest[::-1])
    for request, cut in zip(REQUESTS, cuts, strict=True):
        expected = {place: token for place, token in whole[request.request_id].items() if place >= cut}
        assert found[request.request_id] == expected


@pytest.mark.slow
def test_requests_that_make_place_for_each_other_are_told_the_same():
    assert Engines(num_blocks=4).told(REQUESTS) == uninterrupted()


@pytest.mark.slow
def test_blocks_are_copied_with_their_scales():
    layout, ids = layout_of("llama"), tokens(20)
    runner = Runner(layout, block_size=16, in_fp8=True)
    blocks, others = runner.blocks(20), runner.blocks(20)
    runner.step(Part(0, ids[:19], blocks))
    copies = tuple(
        BlockCopy(source=source, destination=to, num_tokens=count)
        for source, to, count in zip(blocks, others, (16, 3), strict=True)
    )
    (after,) = runner.step(Part(19, ids[19:], others), copies=copies)
    assert torch.equal(after, runner.run(ids)[-1:])


def test_a_cache_in_fp8_takes_about_half():
    """Of a llama with 2 layers of 2 KV heads with 8 dimensions: rows of 16 bytes or of 9."""
    plain, small = (Runner(layout_of("llama"), num_blocks=2, in_fp8=in_fp8) for in_fp8 in (False, True))
    assert plain.executor.kv_bytes_per_token == 2 * 2 * 2 * 16
    assert small.executor.kv_bytes_per_token == 2 * 2 * 2 * 9
    for runner in (plain, small):
        tensors = [(layer.keys, layer.values, layer.key_scales, layer.value_scales) for layer in runner.cache.layers]
        taken = sum(tensor.nbytes for layer in tensors for tensor in layer if tensor is not None)
        assert taken == 2 * 32 * runner.executor.kv_bytes_per_token


class Wrong:
    """A device whose kernel `name` changes one byte of an argument after each launch in fp8."""

    def __init__(self, name: str, argument: str) -> None:
        self._name, self._argument = name, argument

    def __call__(self, kernel, grid, arguments, **options):
        launch(kernel, grid, arguments, **options)
        if kernel.fn.__name__ == self._name and arguments["IN_FP8"]:
            arguments[self._argument].view(torch.uint8).view(-1)[0] ^= 1


WRONGS = {
    ("split_heads", "keys"): "keys",
    ("split_heads", "value_scales"): "values",
    ("attend", "out"): "scores",
}


@pytest.mark.parametrize(
    ("kernel", "argument"),
    [next(iter(WRONGS)), *(pytest.param(*wrong, marks=pytest.mark.slow) for wrong in list(WRONGS)[1:])],
)
def test_a_device_that_stores_or_reads_another_bit_is_refused(kernel, argument):
    runner = runs.Runner(layout_of("llama"), num_blocks=2, launch=Wrong(kernel, argument))
    batch = runs.batch_of([Part(0, tokens(9), [0])], 32)
    reason = f"{WRONGS[kernel, argument]} in fp8 of layer 0 are stored or read wrongly on this device"
    assert runner.executor.kv_code_difference(batch) == reason


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gemma2", "phi, norms of heads"])
def test_a_device_that_does_as_it_should_is_not(model):
    runner = Runner(layout_of(model), num_blocks=4)
    batch = runs.batch_of([Part(0, tokens(70), [0, 1, 2])], 32)
    assert runner.executor.kv_code_difference(batch) is None


@pytest.mark.slow
def test_a_model_is_loaded_with_its_cache_in_fp8_and_has_numerics_of_its_own(monkeypatch):
    """As at load on a GPU, with the interpreter in its place. A device that is wrong in fp8 gets no backend."""
    cuda, group, launches = torch.device("cuda", 0), SingleRank(), [launch, Wrong("split_heads", "keys")]

    def interpreted(layout, group, max_positions, device):
        cpu = torch.device("cpu")
        return GpuExecutor(layout, group, max_positions=max_positions, device=cpu, launch=launches.pop(0)), NUMERICS

    monkeypatch.setattr(backend, "_executor", interpreted)
    sizes = {"max_model_len": 64, "block_size": 16, "device": cuda}
    llama = models.prepared(layout_of("llama"), group, **sizes)
    made = backend.make_backend(llama, group, **sizes, kv_cache_dtype="fp8")
    assert isinstance(made, NativeBackend), made
    assert made.numerics == "gpu-native-1+kv-e4m3-1"
    assert made.allocate_cache(2, 16).layers[0].keys.dtype == torch.uint8
    refused = backend.make_backend(llama, group, **sizes, kv_cache_dtype="fp8")
    assert refused == "keys in fp8 of layer 0 are stored or read wrongly on this device"
