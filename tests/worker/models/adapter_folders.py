"""Random adapters of tiny models, as PEFT writes them, and the checkpoints that they are merged into."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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
    change: Change | None = None,
    std: float = 0.1,
    **config: Any,
) -> Path:
    """An adapter of some linears of the model in `base`; `change` may change its config and its tensors before they are
    written.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = modules_of(base, targets)
    assert modules
    tensors = {}
    for name, (outputs, inputs) in sorted(modules.items()):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * std
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * std
    written = {
        **PEFT_WRITES,
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
        **config,
    }
    if change is not None:
        change(written, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def merge(base: Path, adapter: Path, folder: Path, scale: float | None = None) -> Path:
    """The checkpoint in float32 with the adapter's products added to its weights."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    scale = config["lora_alpha"] / root if scale is None else scale
    tensors, low = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in list(low):
        if name.endswith("lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            product = low[name.replace("lora_A", "lora_B")].double() @ low[name].double() * scale
            weight = tensors[f"{module}.weight"]
            tensors[f"{module}.weight"] = (weight.double() + product).float()
    settings = json.loads((folder / "config.json").read_text())
    settings |= {name: "float32" for name in ("dtype", "torch_dtype") if name in settings}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
