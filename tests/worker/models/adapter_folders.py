"""Random adapters of tiny models, as PEFT writes them, and the checkpoints that they are merged into."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models.adapter_places import AdapterPlaces
from holdfast.worker.models.adapter_tables import OwnTables
from holdfast.worker.models.stated_config import read_stated_config

TABLES = ("model.embed_tokens", "lm_head")
PREFIX = "base_model.model."
ALL = r".*(attn|attention|mlp)\..*"
PEFT_WRITES = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "exclude_modules")),
    **dict.fromkeys(("kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config")),
    **dict.fromkeys(("megatron_config", "modules_to_save", "monteclora_config", "target_parameters", "use_bdlora")),
    **dict.fromkeys(("trainable_token_indices", "velora_config", "revision", "auto_mapping")),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), False),
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "megatron_core": "megatron.core",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "use_rslora": False,
    "loftq_config": {},
    "alpha_pattern": {},
    "rank_pattern": {},
}
"""Fields of `adapter_config.json` that PEFT writes of a plain adapter, beside those that say what it is."""
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def modules_of(base: Path, targets: Iterable[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of the linears in a checkpoint's layers, of those whose names end with a target."""
    tensors = load_file(base / "model.safetensors")
    names = {name.removesuffix(".weight"): tuple(tensor.shape) for name, tensor in tensors.items() if tensor.dim() == 2}
    layers = {name: shape for name, shape in names.items() if any(part.isdigit() for part in name.split("."))}
    return {
        name: shape for name, shape in layers.items() if targets is None or name.rpartition(".")[2] in tuple(targets)
    }


def save_adapter(
    base: Path,
    folder: Path,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    seed: int = 0,
    targets: Iterable[str] | None = None,
    tables: Iterable[str] = (),
    stacks: Iterable[str] = (),
    change: Change | None = None,
    std: float = 0.1,
    **config: Any,
) -> Path:
    """An adapter of some linears of the model in `base`, and of `tables`: `lm_head` and a name that ends with
    `embed_tokens`, and of `stacks`: weights of all experts together, in the order of the module that has them.
    `change` may change its config and its tensors before they are written.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = modules_of(base, targets)
    assert modules
    tensors = {}
    for name, (outputs, inputs) in sorted(modules.items()):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * std
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * std
    for name in tables:
        tensors |= of_table(base, name, rank, generator, std)
    for owner in owners_of_experts(base) if stacks else ():
        tensors |= of_experts(base, owner, tuple(stacks), rank, generator, std)
    written = {
        **PEFT_WRITES,
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in (*modules, *tables)}),
        "bias": "none",
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
        "target_parameters": [f"mlp.experts.{one}" for one in stacks] or None,
        **config,
    }
    if change is not None:
        change(written, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def of_table(base: Path, name: str, rank: int, generator: torch.Generator, std: float) -> dict[str, Tensor]:
    """As PEFT writes the adapter of a table or head, with a copy of the model's weight."""
    stored = load_file(base / "model.safetensors")
    weight = next(stored[f"{one}.weight"] for one in (name, "model.embed_tokens") if f"{one}.weight" in stored)
    a, b = ("lora_A.weight", "lora_B.weight") if name == "lm_head" else ("lora_embedding_A", "lora_embedding_B")
    outputs, inputs = weight.shape if name == "lm_head" else weight.shape[::-1]
    return {
        f"{PREFIX}{name}.{a}": torch.randn(rank, inputs, generator=generator) * std,
        f"{PREFIX}{name}.{b}": torch.randn(outputs, rank, generator=generator) * std,
        f"{PREFIX}{name}.base_layer.weight": weight.clone(),
    }


def owners_of_experts(base: Path) -> list[str]:
    """The modules of a checkpoint that have the weights of experts, as transformers keeps these together."""
    names = load_file(base / "model.safetensors")
    return sorted({name.partition(".experts.")[0] + ".experts" for name in names if ".experts." in name})


def of_experts(
    base: Path, owner: str, stacks: tuple[str, ...], rank: int, generator: torch.Generator, std: float
) -> dict[str, Tensor]:
    """As PEFT writes adapters of the weights of all experts: a name for each, the first one innermost."""
    inner = load_file(base / "model.safetensors")[f"{owner}.0.gate_proj.weight"].shape
    count, found = len(experts_of(base, owner)), {}
    shapes = {"gate_up_proj": (2 * inner[0], inner[1]), "down_proj": (inner[1], inner[0])}
    for depth, one in enumerate(reversed(stacks)):
        name = owner + depth * ".base_layer"
        outputs, inputs = shapes[one]
        found[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(count * rank, inputs, generator=generator) * std
        found[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank * count, generator=generator) * std
    return found


def experts_of(base: Path, owner: str) -> list[str]:
    """The modules of the experts below `owner`."""
    names = load_file(base / "model.safetensors")
    numbers = {name.removeprefix(owner).split(".")[1] for name in names if name.startswith(f"{owner}.")}
    return [f"{owner}.{number}" for number in sorted(numbers, key=int)]


def merge(base: Path, adapter: Path, folder: Path, scale: float | None = None) -> Path:
    """The checkpoint in float32 with the adapter's products added to its weights."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    scale = config["lora_alpha"] / root if scale is None else scale
    tensors, low = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    if settings.get("tie_word_embeddings") and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"], settings["tie_word_embeddings"] = tensors["model.embed_tokens.weight"].clone(), False
    for name in list(low):
        if name.endswith("lora_embedding_A"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_embedding_A")
            product = (low[name.replace("embedding_A", "embedding_B")].double() @ low[name].double() * scale).T
            tensors[f"{module}.weight"] = (tensors[f"{module}.weight"].double() + product).float()
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        owner = module.replace(".base_layer", "")
        if name.endswith("lora_A.weight") and owner.endswith(".experts"):
            b = low[name.replace("lora_A", "lora_B")].double()
            merge_experts(tensors, experts_of(base, owner), low[name].double(), b * scale)
        elif name.endswith("lora_A.weight"):
            product = low[name.replace("lora_A", "lora_B")].double() @ low[name].double() * scale
            weight = tensors[f"{module}.weight"]
            tensors[f"{module}.weight"] = (weight.double() + product).float()
    settings |= {name: "float32" for name in ("dtype", "torch_dtype") if name in settings}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def places_of(base: Path, group: TensorParallelGroup | None = None) -> AdapterPlaces:
    """Places of a rank's layout of the model in `base`."""
    config = read_stated_config(json.loads((base / "config.json").read_text()))
    return AdapterPlaces(config, group or SingleRank(), OwnTables(ModelConfig(model=str(base)), config, base))


def merge_experts(tensors: dict[str, Tensor], experts: list[str], a: Tensor, b: Tensor) -> None:
    """Adds to each expert's weights the product of its part of matrices of all experts."""
    a, b = a.unflatten(0, (len(experts), -1)), b.unflatten(1, (-1, len(experts)))
    for number, expert in enumerate(experts):
        product = b[:, :, number] @ a[number]
        of_gate = len(tensors[f"{expert}.gate_proj.weight"])
        is_down = product.shape == tensors[f"{expert}.down_proj.weight"].shape
        parts = {"down_proj": product} if is_down else {"gate_proj": product[:of_gate], "up_proj": product[of_gate:]}
        for part, change in parts.items():
            weight = tensors[f"{expert}.{part}.weight"]
            tensors[f"{expert}.{part}.weight"] = (weight.double() + change).float()
