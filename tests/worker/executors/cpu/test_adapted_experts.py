"""Adapters of experts as any version of PEFT writes them (`target_parameters`), and those that are refused by name."""

import re

import pytest
import torch

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.adapter_folder import read_adapter
from tests.parity.families import save_tiny_model
from tests.worker.executors.cpu.native import same_bits
from tests.worker.executors.cpu.test_adapters import EXPERTS, Adapted, packed_in, stated
from tests.worker.models.adapter_folders import PREFIX, owners_of_experts, places_of, save_adapter

COUNT = 4
FEW = ("q_proj",)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Gate and up of its experts together have as many outputs as inputs."""
    return save_tiny_model("qwen2_moe", tmp_path_factory.mktemp("mixture") / "base")


def turned(_, tensors):
    """The same additions as PEFT before 0.19.1 writes them: inputs are outputs."""
    for name in [one for one in tensors if ".experts" in one and "lora_A" in one]:
        other = name.replace("lora_A", "lora_B")
        a = tensors[name].unflatten(0, (COUNT, -1))
        b = tensors[other].unflatten(1, (-1, COUNT))
        tensors[name] = b.permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = a.permute(2, 1, 0).flatten(1, 2).contiguous()


@pytest.mark.parametrize("stacks", [EXPERTS, EXPERTS[1:]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_old_versions_of_peft_have_the_same_bits(base, tmp_path, stacks, dtype):
    own = save_adapter(base, tmp_path / "own", targets=FEW, stacks=stacks, rank=5)
    old = save_adapter(base, tmp_path / "old", targets=FEW, stacks=stacks, rank=5, change=turned, peft_version="0.18.1")
    runner = Adapted(stated(base, dtype=dtype)).put(base, own, old)
    assert same_bits(runner.alone(2), runner.alone(1))
    assert not same_bits(runner.alone(1), runner.alone(0))
    runner.close()


def test_where_shapes_say_nothing_the_version_does(base, tmp_path):
    """Of gate and up alone both ways fit the model."""
    only = {"targets": FEW, "stacks": EXPERTS[:1]}
    own = save_adapter(base, tmp_path / "own", **only)
    old = save_adapter(base, tmp_path / "old", **only, change=turned, peft_version="0.19.0")
    other = save_adapter(base, tmp_path / "other", **only, peft_version="0.18.0")
    runner = Adapted(stated(base, dtype="float32")).put(base, own, old, other)
    assert same_bits(runner.alone(2), runner.alone(1))
    assert not same_bits(runner.alone(3), runner.alone(1))
    runner.close()
    unsaid = save_adapter(base, tmp_path / "unsaid", **only, peft_version=None)
    with pytest.raises(ConfigurationError, match="no peft_version"):
        places_of(base).named(read_adapter("a", str(unsaid)))


def without(part):
    def change(_, tensors):
        for name in [one for one in tensors if part in one]:
            del tensors[name]

    return change


def narrower(_, tensors):
    tensors.update({name: one[:-1].clone() for name, one in tensors.items() if ".experts.lora_A" in name})


def fewer_ranks(_, tensors):
    for name, one in list(tensors.items()):
        if ".experts" in name:
            tensors[name] = one[:-COUNT].clone() if "lora_A" in name else one[:, :-COUNT].clone()


def of_another_model(_, tensors):
    tensors.update({name: one[:, :-1].clone() for name, one in tensors.items() if ".experts.lora_A" in name})


BAD = {
    "has no lora_B": {"change": without("base_layer.lora_B")},
    "target_parameters name, of each expert, gate_up_proj.* tensors are missing": {"change": without("base_layer")},
    "must have 8 ranks for each of 4 experts": {"change": fewer_ranks},
    r"ranks for each of|lora_A \(31, 16\)": {"change": narrower},
    "it is an adapter of another model": {"change": of_another_model},
    "which its target_modules do not name": {"target_parameters": None},
    "none of its weights": {"target_parameters": ["mlp.experts.up_proj"]},
    "has rank 300": {"rank_pattern": {"experts.down_proj": 300}},
}


@pytest.mark.parametrize("told", BAD)
def test_refused_by_name(base, tmp_path, told):
    folder = save_adapter(base, tmp_path / "bad", targets=FEW, stacks=EXPERTS, **BAD[told])
    places = places_of(base)
    with pytest.raises(ConfigurationError, match=rf"adapter a in .*{told}"):
        places.apply(places.named(read_adapter("a", str(folder))))


def test_a_model_without_experts(base, tmp_path):
    dense = save_tiny_model("llama", tmp_path / "dense")
    folder = save_adapter(base, tmp_path / "adapter", targets=FEW, stacks=EXPERTS)
    with pytest.raises(
        ConfigurationError, match=r"layers\.0\.mlp\.experts has tensors of experts, and the model has none"
    ):
        places_of(dense).named(read_adapter("a", str(folder)))


@pytest.mark.parametrize("stacks", [(), EXPERTS])
def test_one_by_one_all_of_a_kind_or_none(base, tmp_path, stacks):
    """Adapters of each expert, as of transformers 4: one that lacks an expert is refused."""

    def lacks_one(_, tensors):
        for part in "AB":
            del tensors[f"{PREFIX}{owners_of_experts(base)[0]}.2.up_proj.lora_{part}.weight"]

    folder = save_adapter(base, tmp_path / "lacks", change=lacks_one)
    places = places_of(base)
    with pytest.raises(ConfigurationError, match=r"name model\.layers\.0\.mlp\.experts\.2\.up_proj, and there are no"):
        places.apply(places.named(read_adapter("a", str(folder))))
    few = save_adapter(base, tmp_path / "few", targets=FEW, stacks=stacks, target_modules=["q_proj", "up_proj"])
    with pytest.raises(ConfigurationError, match=r"name model\.layers\.0\.mlp\.shared_expert\.up_proj"):
        places.apply(places.named(read_adapter("a", str(few))))


@pytest.mark.parametrize("number", ["a", "b"])
def test_a_neighbours_matrices_are_seen(base, tmp_path, number):
    """The matrices of one expert are packed as those of another."""
    folder = save_adapter(base, tmp_path / "adapter", targets=FEW, stacks=EXPERTS)
    places = places_of(base)
    read = places.named(read_adapter("a", str(folder)))
    runner = Adapted(stated(base, dtype="float32"))
    packed = packed_in(runner.executor, places, folder)
    assert places.prove(read, packed.compare(read.content), torch.float32)
    _, first, _ = runner.executor.packed.sites.mixtures[0]
    packed.linears[number][[first, first + 1]] = packed.linears[number][[first + 1, first]]
    with pytest.raises(ConfigurationError, match=r"experts\.\d\.\w+: its addition to fixed inputs is not the product"):
        places.prove(read, packed.compare(read.content), torch.float32)
    runner.close()


@pytest.mark.parametrize("theirs", ["model.language_model.", "language_model.model.", ""])
def test_names_of_models_that_hold_this_one_or_are_a_part_of_it(base, tmp_path, theirs):
    """`theirs`: how names begin, in place of `model.`."""

    def change(config, tensors):
        renamed = {
            re.sub(r"model\.model\.model\.", f"model.model.{theirs}", name): one for name, one in tensors.items()
        }
        tensors.clear(), tensors.update(renamed)
        config["target_modules"] = rf"{re.escape(theirs)}layers\.\d+\.self_attn\.(q|v)_proj"

    plain = save_adapter(base, tmp_path / "plain", targets=("q_proj", "v_proj"), stacks=EXPERTS)
    other = save_adapter(base, tmp_path / "other", targets=("q_proj", "v_proj"), stacks=EXPERTS, change=change)
    runner = Adapted(stated(base, dtype="float32")).put(base, plain, other)
    assert same_bits(runner.alone(2), runner.alone(1))
    runner.close()
