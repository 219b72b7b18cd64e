"""Kernels of the GPU executor, compiled ahead for several devices: registers, shared memory, spills and occupancy.

    python -m scripts.gpu_kernels [--check]      writes, or compares with, docs/gpu-kernels.json

Needs Triton, which brings its own ptxas, and no GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.executors.kv_cache import KVCache, KVSpec
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.tensor_parallel import SingleRank
from scripts.gpu_shapes import CODES, SHAPES, Shape, coded_matrix, decode_batch, drawn_rows, layout_of, prompt_batch

TABLE: Final = Path(__file__).parent.parent / "docs" / "gpu-kernels.json"
DEVICES: Final = (80, 90, 100)
HOT: Final = (
    "linear",
    "grouped_linear",
    "choose_experts",
    "add_experts",
    "attend",
    "write_pages",
    "add_norm",
    "split_heads",
    "activate",
    "merge_splits",
    "best_of_blocks",
    "race_chunks",
    "add_over_ranks",
)
"""These may not spill."""

_ROUNDING: Final = ("linear", "grouped_linear")
"""Their output has the model's dtype in Hugging Face's modules."""

_DTYPES: Final = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_SHARED_BYTES: Final = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Of a multiprocessor; a block takes 1 KiB more than it asks for."""
_REGISTERS, _MAX_WARPS, _MAX_BLOCKS = 65536, 64, 32
_INSTRUCTION: Final = re.compile(
    r"(wgmma\.mma_async)\.sync\.aligned\.(m\d+n\d+k\d+)|(mma)\.sync\.aligned\.(m\d+n\d+k\d+)|(tcgen05\.mma)\b"
)


LATENT_SPECS: Final = {"DeepSeek-V2-Lite": KVSpec(num_heads=16, num_kv_heads=16, key_dim=192, value_dim=128)}
_DECODE_ROWS: Final = (1, 32, 64, 128)
_PROMPT_ROWS: Final = 2048


@dataclass(frozen=True)
class Use:
    """A kernel as the executor launches it."""

    kernel: Any
    name: str
    arguments: tuple[tuple[str, str], ...]
    """Each argument's type: of Triton, or `constexpr`."""
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    """Pointers, and numbers that are multiples of 16."""
    num_warps: int
    num_stages: int

    @property
    def title(self) -> str:
        """One line that tells it from others."""
        shown = [f"{name}={value}" for name, value in self.constants if name.isupper() and value not in (False, 0)]
        out = dict(self.arguments).get("out", "*fp32")
        if dict(self.constants).get("CODE"):
            shown.append(f"scales {dict(self.arguments)['scales'].removeprefix('*')}")
        rounds = f" -> {out.removeprefix('*')}" if self.name in _ROUNDING and out != "*fp32" else ""
        return f"{self.name}({', '.join(shown)}){rounds}"


def uses_of(shapes: Iterable[Shape], decode_rows: Iterable[int], prompt_rows: int) -> list[Use]:
    """All different launches of decode steps and of one prompt, keys and values in the model's dtype and in fp8."""
    from holdfast.worker.executors.gpu.executor import GpuExecutor

    found: dict[str, Use] = {}

    def record(kernel: Any, grid: Any, arguments: Mapping[str, Any], *, num_warps: int, num_stages: int) -> None:
        use = use_of(kernel, arguments, num_warps, num_stages)
        found.setdefault(use.title, use)

    for shape in shapes:
        executor = GpuExecutor(
            layout_of(shape),
            SingleRank(),
            max_positions=8192,
            device=torch.device("meta"),
            launch=record,
        )
        executor.allocate_cache(16, 64)
        for count in decode_rows:
            executor.launch(decode_batch(count), with_logits=False)
        executor.launch(prompt_batch(prompt_rows), with_logits=False)
        executor.keep_kv_in_code()
        executor.allocate_cache(16, 64)
        for batch in (*map(decode_batch, decode_rows), prompt_batch(prompt_rows)):
            executor.launch(batch, with_logits=False)
        for draws, masks in drawn_rows():
            logits = executor.collect(executor.launch(decode_batch(len(draws)), with_logits=True)).logits
            assert logits is not None, "they were asked for"
            executor.make_sampler().launch(logits, draws, masks)
    _run_paged_kernels(record, prompt_rows)
    _run_modules(record, (*decode_rows, prompt_rows))
    _run_codes(record, (*decode_rows, prompt_rows))
    _run_exchange(record)
    _run_adapters(record)
    return sorted(found.values(), key=lambda use: use.title)


def _run_paged_kernels(launch: Any, prompt_rows: int) -> None:
    """The attention of models without a native backend, whose keys and values differ in width."""
    from holdfast.worker.executors.gpu.paged_kernels import PagedKernels

    for spec in LATENT_SPECS.values():
        device = torch.device("meta")
        kernels = PagedKernels([spec], max_positions=8192, block_size=64, device=device, launch=launch)
        (layer,) = KVCache.allocate([spec], 16, 64, torch.bfloat16, device).layers
        for batch in (decode_batch(1), decode_batch(64), prompt_batch(prompt_rows)):
            kernels.begin(batch)
            rows = len(batch.token_ids)
            sizes = ((rows, spec.num_heads, spec.key_dim), (spec.num_kv_heads, rows, spec.key_dim))
            query, key = (torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes)
            kernels.write(layer, key, key.new_empty(spec.num_kv_heads, rows, spec.value_dim))
            kernels.attend(layer, query, spec.key_dim**-0.5, None)


def _run_modules(record: Any, counts: Iterable[int]) -> None:
    """The products, experts and means of Hugging Face's modules, by the shapes of DeepSeek-V2-Lite."""
    from holdfast.worker.executors.gpu.launches import Launches
    from holdfast.worker.executors.gpu.products import DeviceExperts, DeviceProduct, RowFunctions

    def weight(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    product = DeviceProduct(Launches(record), weight(3072, 2048), None)
    experts = DeviceExperts(
        record, weight(64, 2816, 2048), None, weight(64, 2048, 1408), None, lambda up: up.chunk(2, -1)[0]
    )
    for count in counts:
        x = weight(count, 2048)
        product(x)
        experts(x, x.new_empty((count, 6), dtype=torch.int64), weight(count, 6))
        with RowFunctions(record, x.device):
            x.float().mean(-1)


def _run_codes(record: Any, counts: Iterable[int]) -> None:
    """Linears of quantized weights."""
    from holdfast.worker.executors.gpu.launches import Launches

    for count in counts:
        x = torch.empty((count, 4096), dtype=torch.bfloat16, device="meta")
        for form, group in CODES.values():
            out = torch.empty((1, count, 4096), device="meta")
            Launches(record).linear(x, Linear(codes=(coded_matrix(form, group),)), out)


def _run_adapters(record: Any) -> None:
    """What rows with adapters add, by the shapes of Llama-3.1-8B."""
    from holdfast.worker.executors.gpu.adapter_launches import WORDS, AdapterLaunches, adapter_sites, adapter_tiles
    from holdfast.worker.executors.gpu.launches import Launches
    from holdfast.worker.executors.gpu.mixtures import RowGroups

    layout = layout_of(SHAPES["Llama-3.1-8B"])
    launches, sites = AdapterLaunches(record), adapter_sites(layout)
    table = torch.empty((16, len(sites), WORDS), dtype=torch.int64, device="meta")
    ids = torch.empty(64, dtype=torch.int32, device="meta")
    for tile in adapter_tiles(layout.dtype):
        groups = RowGroups(tile, ids[:16], ids[: 16 * tile.tokens].new_empty(16, tile.tokens))
        launches.group(ids, len(table), groups)
        for place, site in sites.items():
            inner = torch.empty(site.num_slices * site.num_pieces, 64, 16, device="meta")
            x = torch.empty((64, site.num_inputs), dtype=layout.dtype, device="meta")
            out = torch.empty(site.num_slices, 64, site.num_outputs, device="meta")
            if place == "embedding":
                inner = inner[:1]
                launches.look_up(site, ids, ids, x, table, 0, 1.0, inner)
            else:
                launches.shrink(site, x, table, groups, inner)
            launches.expand(site, inner, x, table, ids.new_empty(site.num_outputs), groups, out)
    Launches(record).cap(out, 0.5, 30.0)


def _run_exchange(record: Any) -> None:
    """What 2, 4 and 8 ranks launch to exchange sums, best tokens, logits and drawn tokens."""
    from holdfast.worker.executors.gpu.graphs import Buffers
    from holdfast.worker.executors.gpu.peer_memory import PeerMemory
    from holdfast.worker.executors.gpu.rank_exchange import NoExchange, PeerExchange

    meta = torch.device("meta")
    for size in (2, 4, 8):
        for rank in (0, 1):
            group, buffers = SingleRank(), Buffers(meta)
            group.rank, group.size = rank, size
            peers = PeerExchange(PeerMemory((0,) * size), group, 1 << 23, NoExchange(), meta, record)
            x = torch.empty(128, 4096, device=meta)
            for part in (x, x[:1]):
                peers.add(part.expand(8 // size, *part.shape), buffers)
                peers.add_in_place(part)
            peers.gather(x, "x", buffers)
            peers.gather_to_leader(x, buffers)
            peers.take_from_leader(torch.empty(64, dtype=torch.int32, device=meta))


def use_of(kernel: Any, arguments: Mapping[str, Any], num_warps: int, num_stages: int) -> Use:
    """As Triton's own launcher would specialize it."""
    kinds: list[tuple[str, str]] = []
    constants: list[tuple[str, Any]] = []
    aligned = []
    for parameter in kernel.params:
        value = arguments[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else _kind(value)
        specialized = isinstance(value, int) and not parameter.do_not_specialize
        if kind != "constexpr" and specialized and value == 1:
            kind = "constexpr"
        if kind == "constexpr":
            constants.append((parameter.name, value))
        elif isinstance(value, Tensor) or (specialized and value % 16 == 0):
            aligned.append(parameter.name)
        kinds.append((parameter.name, kind))
    name = kernel.fn.__name__
    return Use(kernel, name, tuple(kinds), tuple(constants), tuple(aligned), num_warps, num_stages)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return _DTYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compiled_for(use: Use, device: int) -> Any:
    """The kernel as Triton compiles it for a device of this compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [name for name, _ in use.arguments]
    source = ASTSource(
        use.kernel,
        dict(use.arguments),
        {(names.index(name),): value for name, value in use.constants},
        {(names.index(name),): [["tt.divisibility", 16]] for name in use.aligned},
    )
    options = {"num_warps": use.num_warps, "num_stages": use.num_stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", device, 32), options=options)


def measured(use: Use, device: int) -> dict[str, Any]:
    """What the kernel takes of such a device."""
    compiled = compiled_for(use, device)
    registers, stack = resource_usage(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    found = {"".join(part for part in match if part) for match in _INSTRUCTION.findall(compiled.asm["ptx"])}
    return {
        "registers": registers,
        "shared_bytes": shared,
        "stack_bytes": stack,
        "warps_on_a_multiprocessor": occupancy(device, registers, shared, use.num_warps),
        "instructions": sorted(found),
    }


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, where spilled registers go."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def occupancy(device: int, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Warps that a multiprocessor holds at once. Registers are given out 8 a thread, 256 a warp at a time."""
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = _REGISTERS // of_a_warp // num_warps
    by_memory = _SHARED_BYTES[device] // (shared_bytes + 1024)
    return min(by_registers, by_memory, _MAX_WARPS // num_warps, _MAX_BLOCKS) * num_warps


def table(uses: Iterable[Use], devices: Iterable[int] = DEVICES) -> dict[str, dict[str, Any]]:
    return {use.title: {f"sm_{device}": measured(use, device) for device in devices} for use in uses}


def worsened(kept: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What of `found` is worse than in the table that is kept, or not in it."""
    wrong = []
    for title, devices in found.items():
        for device, now in devices.items():
            before = kept.get(title, {}).get(device)
            if before is None:
                wrong.append(f"{title} on {device} is not in the table")
            elif now["warps_on_a_multiprocessor"] < before["warps_on_a_multiprocessor"]:
                wrong.append(f"{title} on {device}: {before} before, {now} now")
            elif now["stack_bytes"] > before["stack_bytes"]:
                wrong.append(f"{title} on {device} spills more: {now['stack_bytes']} bytes")
            elif now["instructions"] != before["instructions"]:
                wrong.append(f"{title} on {device} has other instructions: {now['instructions']}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table that is kept")
    parser.add_argument("--quick", action="store_true", help="one model and one device; with --check")
    options = parser.parse_args()
    if options.quick:
        uses = uses_of([SHAPES["Llama-3.1-8B"]], (64,), 64)
        found = table([use for use in uses if use.name == "linear"][:2], (90,))
    else:
        found = table(uses_of(SHAPES.values(), _DECODE_ROWS, _PROMPT_ROWS))
    if options.check:
        wrong = worsened(json.loads(TABLE.read_text()), found)
        print("\n".join(wrong) or "no kernel is worse than in the table")
        return bool(wrong)
    TABLE.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    sys.exit(main())
