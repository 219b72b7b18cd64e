"""Examination of this machine for `holdfast doctor`: one finding after the other, each with what to do about it."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.machine import Machine, check_fits, crowding
from holdfast.cluster.config.model_files import (
    check_files,
    check_hub,
    local_path,
    uneven_heads,
    weights_notice,
)
from holdfast.cluster.serve.log_files import ray_folder
from holdfast.cluster.serve.preflight import check_ports, check_socket_paths
from holdfast.cluster.serve.security import check_exposed
from holdfast.worker.errors import HoldfastError
from holdfast.worker.process_memory import readable_bytes
from holdfast.worker.user_folder import user_folder
from holdfast.worker.wire.loopback import check_loopback
from holdfast.worker.wire.tls import DAY_S, expiry_warning, first_expiry

_PACKAGES: Final = ("holdfast", "torch", "transformers", "ray", "grpcio")
_ROOM_BYTES: Final = 2**30


class Level(IntEnum):
    """Severity of a line of `holdfast doctor`."""

    GOOD = 0
    NOTE = 1
    BAD = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    found: str
    advice: str = ""


def examine(config: HoldfastConfig, *, quick: bool = False) -> Iterator[Finding]:
    """The quick ones first. Without `quick`, each model is loaded once, if nothing before was bad."""
    worst = Level.GOOD
    for finding in _quick(config):
        worst = max(worst, finding.level)
        yield finding
    if quick or worst is Level.BAD:
        if not quick:
            yield Finding(Level.NOTE, "loading", "left out", "skipped until the problems above are fixed")
        return
    for one in config.each_model:
        yield from loaded(one)


def _quick(config: HoldfastConfig) -> Iterator[Finding]:
    yield from versions()
    machine = Machine.here()
    yield devices(machine)
    yield from room()
    host = config.cluster.host or "127.0.0.1"
    yield home()
    if config.cluster.address is None:
        yield checked("loopback", check_loopback, "127.0.0.1 is there, for Ray and ranks")
        yield checked("sockets", check_socket_paths, f"paths in {ray_folder()} are short enough")
    if (proxy := proxies()) is not None:
        yield proxy
    yield checked("ports", lambda: check_ports(config), "the configured ports are free")
    yield checked(
        "exposure",
        lambda: check_exposed(config.security, host),
        f"routers listen on {host}, {_of_ray(config.cluster.address)}",
    )
    yield from certificates(config)
    for one in config.each_model:
        name = one.model.name
        files = checked(f"files of {name}", partial(check_files, one), str(local_path(one) or "on the hub"))
        yield files
        if files.level is Level.GOOD and (weights := weights_notice(one)) is not None:
            yield Finding(Level.GOOD, f"weights of {name}", weights)
        if local_path(one) is None:
            yield checked(f"hub id of {name}", partial(check_hub, one), "found on the hub")
        yield tokenizer(one)
        if (message := uneven_heads(one)) is not None:
            yield Finding(Level.NOTE, f"ranks of {name}", message, "choose a --tp that divides the heads")
    shape = f"{readable_bytes(machine.available_bytes)} of memory left, {machine.num_cores} cores"
    yield checked("memory", lambda: check_fits(config.each_model, machine), shape)
    if crowded := crowding(config.each_model, machine):
        yield Finding(Level.NOTE, "cores", crowded)


def certificates(config: HoldfastConfig, now_s: float | None = None) -> Iterator[Finding]:
    """When those of the settings expire."""
    now_s = time.time() if now_s is None else now_s
    for name in ("tls_cert", "link_cert"):
        path = getattr(config.security, name)
        if path is None:
            continue
        what = f"security.{name}"
        try:
            expires_s = first_expiry(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            yield Finding(Level.BAD, what, f"{path}: {error}", "name a certificate in PEM that can be read here")
            continue
        found = expiry_warning(path, expires_s, now_s)
        level = Level.BAD if now_s >= expires_s else Level.NOTE if found else Level.GOOD
        yield Finding(level, what, found or f"{path} expires in {(expires_s - now_s) / DAY_S:.0f} days")


def _of_ray(address: str | None) -> str:
    return "Ray, Serve and ranks on 127.0.0.1" if address is None else f"Ray at {address} where its operator has it"


def checked(what: str, check: Callable[[], None], found: str) -> Finding:
    """A check of `serve`: its error says what to do."""
    try:
        check()
    except HoldfastError as error:
        return Finding(Level.BAD, what, str(error))
    return Finding(Level.GOOD, what, found)


def versions() -> Iterator[Finding]:
    """Findings about Python, and about each package that Holdfast runs on."""
    python = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Finding(Level.BAD, "Python", python, "Holdfast needs 3.11, 3.12 or 3.13: make an environment with one")
    else:
        yield Finding(Level.GOOD, "Python", python)
    for package in _PACKAGES:
        try:
            yield Finding(Level.GOOD, package, version(package))
        except PackageNotFoundError:
            level = Level.NOTE if package == "holdfast" else Level.BAD
            advice = "pip install 'holdfast[serve]', or `make install` in a checkout"
            yield Finding(level, package, "is not installed", advice)


def devices(machine: Machine) -> Finding:
    """The GPUs that the driver shows, and whether PyTorch can use them."""
    if not machine.num_gpus:
        return Finding(Level.GOOD, "devices", f"{machine.num_cores} cores, no NVIDIA GPU: models run on the CPU")
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding(Level.GOOD, "devices", f"{machine.num_cores} cores; {names}")
    found = f"{machine.num_gpus} NVIDIA GPUs, which PyTorch {torch.__version__} cannot use"
    advice = "install a PyTorch with CUDA that fits the driver (`nvidia-smi` says which), or run on the CPU"
    return Finding(Level.NOTE, "devices", found, advice)


def room() -> Iterator[Finding]:
    """Findings about free bytes where Ray keeps its files."""
    folders = {str(ray_folder().parent): "Ray's logs and sockets", "/dev/shm": "Ray's object store"}
    for folder, use in folders.items():
        if not Path(folder).is_dir():
            yield Finding(Level.NOTE, folder, "is not there", f"{use}: make it, with room for {_ROOM_BYTES >> 30} GiB")
            continue
        free = shutil.disk_usage(folder).free
        if free < _ROOM_BYTES:
            advice = f"{use} may not fit: make room there, or lower cluster.object_store_memory"
            yield Finding(Level.NOTE, folder, f"{readable_bytes(free)} free", advice)
        else:
            yield Finding(Level.GOOD, folder, f"{readable_bytes(free)} free")


def home() -> Finding:
    """Checks the folder of this user's files."""
    try:
        folder = user_folder()
    except HoldfastError as error:
        return Finding(Level.BAD, "home", str(error))
    if folder.parent.name == ".cache":
        return Finding(Level.GOOD, "home", str(folder))
    advice = "set HOME to a folder of yours, or layouts and compiled libraries are lost with the temporary files"
    return Finding(Level.NOTE, "home", f"this user has no writable one; {folder} is used instead", advice)


def proxies() -> Finding | None:
    """A proxy that clients would go by."""
    found = [name for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") if getenv(name)]
    if not found:
        return None
    said = f"{' and '.join(found)} set: links between routers and replicas, and our clients to loopback, go past it"
    advice = "other clients (curl, OpenAI's) go through it, unless no_proxy names the routers' addresses"
    return Finding(Level.NOTE, "proxy", said, advice)


def getenv(name: str) -> str:
    """Value of a variable, for programs that know either spelling."""
    return os.environ.get(name) or os.environ.get(name.upper()) or ""


def tokenizer(config: HoldfastConfig) -> Finding:
    """Whether it can be read, gives a text back, and has a chat template."""
    from holdfast.cluster.tokenizers import load_tokenizer

    what = f"tokenizer of {config.model.name}"
    model = located(config.worker).model
    folder = Path(model.tokenizer or model.model).expanduser()
    if not folder.exists():
        return Finding(Level.NOTE, what, "is on the hub, and checked when the model is loaded")
    try:
        loaded = load_tokenizer(str(folder))
    except HoldfastError as error:
        return Finding(Level.BAD, what, str(error))
    text = "The capital of France is"
    token_ids = loaded.encode(text, add_special_tokens=False)
    if loaded.decode(token_ids, skip_special_tokens=True).strip() != text:
        advice = "is tokenizer.json that of this model?"
        return Finding(Level.NOTE, what, f"{text!r} is not the same after encoding and decoding", advice)
    if config.model.chat_template is None and loaded.chat_template is None:
        advice = "chats are refused; give one by --chat-template, or use prompts alone"
        return Finding(Level.NOTE, what, "has no chat template", advice)
    return Finding(Level.GOOD, what, "encodes and decodes, and has a chat template")


def loaded(config: HoldfastConfig) -> Iterator[Finding]:
    """The memory plan, and the invariance of this machine: seen by loading the model and running its checks."""
    from holdfast.cluster.offline.inference_engine import InferenceEngine

    name = config.model.name
    try:
        with InferenceEngine(config=config.worker, limits=config.limits) as engine:
            info = engine.info
    except HoldfastError as error:
        yield Finding(Level.BAD, f"loading {name}", str(error))
        return
    cache_bytes = info.num_blocks * info.block_size * info.kv_bytes_per_token
    tokens = info.most_tokens
    plan = f"{readable_bytes(cache_bytes)} of KV cache for each rank, {tokens} tokens, {info.num_full_sequences} "
    found = f"{plan}sequences of {info.max_model_len} tokens, {info.dtype}"
    if tokens < info.max_model_len:
        advice = "raise --kv-cache-memory, or lower --max-model-len"
        yield Finding(Level.BAD, f"memory plan of {name}", found, advice)
    else:
        yield Finding(Level.GOOD, f"memory plan of {name}", found)
    if info.row_invariant:
        yield Finding(Level.GOOD, f"invariance with {name}", "a token's bits do not depend on its batch here")
    else:
        advice = "streams continue after a loss, but may differ from a run without it; see docs/row-invariance.md"
        yield Finding(Level.NOTE, f"invariance with {name}", "a token's last bits depend on its batch here", advice)
