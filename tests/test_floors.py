"""The floors of the house: packages and rooms import downward only, and what a room may load is data, here.

A file at the root of a package holds its words, which all rooms above may import; a folder (or a file named in `ROOMS`)
is a room, private to its package unless it is listed in `DOORS`.
"""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
POLICY = ("service_order", "plan", "kv", "scheduling", "speculation", "tuning", "engine_core")
DEVICE = ("distributed", "layers", "attention", "sampling", "decoder", "model", "engine")
PROCESS = (
    "wire",
    "security",
    "supervision",
    "replica",
)  # wire: both ends of a link read and write its messages by one codec
ROOMS = {  # from the ground up: a room imports from those before it
    "worker": (*POLICY, *DEVICE, *PROCESS),
    "router": (
        *(
            "wire",
            "schemas",
            "text",
            "tools",
            "replicas",
            "dispatch",
            "overload",
            "security",
            "requests",
            "metrics",
            "links",
            "doors",
        ),
        "router",
    ),
    "cluster": (
        *(
            "scaling",
            "config",
            "bundled_model",
            "checks",
            "client",
            "front",
            "offline",
            "serve",
            "simulate",
            "bench",
            "demo",
        ),
        "commands",
    ),
    "cluster.simulate": ("kernel", "oracle", "actors", "world", "capacity"),
    "worker.decoder": ("cpu", "gpu", "program"),  # an executor knows the layout; only the program knows an executor
}
DOORS = {  # what a package may import of those below it
    "router": {"worker": ("words", "service_order", "wire", "security")},  # one codec and lock of the link
    "cluster": {"worker": ("words", *ROOMS["worker"]), "router": ("words", *ROOMS["router"])},
    "cluster.simulate": {
        "worker": ("words", *POLICY, "wire", "supervision"),  # static bounds, and the rule of hangs
        "router": ("words", "wire", "text", "replicas", "dispatch", "overload", "security", "requests"),
        "cluster": ("words", "scaling", "client"),  # the clients' retry policy
    },
    "worker.decoder": {"worker": ("words", *POLICY, *DEVICE[: DEVICE.index("decoder")])},
}
TENSORS = {"torch", "transformers", "safetensors", "numpy"}
IO = {"asyncio", "grpc", "ray", "random", "secrets", "socket", "subprocess", "threading", "time"}
NEVER_LOADS = {  # by room; a package stands for all of its rooms
    "worker": {"ray"},
    "worker.words": TENSORS | IO,
    **{f"worker.{room}": TENSORS | IO for room in POLICY},
    **{f"worker.{room}": {"asyncio", "grpc"} for room in DEVICE},
    "worker.decoder": {"ray", "asyncio", "grpc"},
    **{f"worker.decoder.{room}": {"ctypes", "fcntl", "subprocess"} for room in ("words", "program")},
    "worker.decoder.cpu": {"ray", "asyncio", "grpc", "transformers"},
    "worker.decoder.gpu": {"ray", "asyncio", "grpc", "transformers"},  # calls CUDA's driver by ctypes
    "worker.wire": TENSORS | IO,
    "router": {"torch", "ray"},
    "router.words": IO,
    "router.wire": TENSORS | (IO - {"grpc"}),
    "router.tools": TENSORS | IO,
    "router.replicas": TENSORS | IO,
    "router.dispatch": TENSORS | IO,
    "router.overload": TENSORS | IO,
    "router.security": TENSORS | IO,  # keys are made by a command, and looked up at the time that is passed in
    "cluster.scaling": TENSORS | IO,
    "cluster.simulate": TENSORS | (IO - {"random", "grpc"}),  # the retry policy names its codes
}
STUBS = (
    "worker.wire",
    "worker.replica",
    "router.wire",
    "router.links",
    "router.doors",
    "cluster.client",
    "cluster.bench",
)


def room(dotted: str) -> tuple[str, str]:
    """(package, room) of a module of ours, such as `holdfast.worker.kv.prefix_cache`."""
    package, *rest = dotted.removeprefix("holdfast.").split(".")
    if rest and f"{package}.{rest[0]}" in ROOMS:
        package, rest = f"{package}.{rest[0]}", rest[1:]
    return package, rest[0] if rest and rest[0] in ROOMS[package] else "words"


@cache
def sources() -> dict[Path, str]:
    """Every file of the packages, with its dotted name."""
    found = [path for package in ("worker", "router", "cluster") for path in sorted((ROOT / package).rglob("*.py"))]
    return {path: "holdfast." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found}


@cache
def imports(path: Path, *, lazy: bool = True) -> frozenset[str]:
    """Dotted names of what a file imports; without `lazy`, only of what loading it imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    counted = [node for node in nodes if lazy or id(node) not in inside]
    plain = [alias.name for node in counted if isinstance(node, ast.Import) for alias in node.names]
    origins = [node for node in counted if isinstance(node, ast.ImportFrom)]
    assert not any(node.level for node in origins), f"{path}: a relative import"
    members = [f"{node.module}.{alias.name}" for node in origins for alias in node.names]
    modules = set(sources().values())
    return frozenset([*plain, *(name for name in members if name in modules), *(node.module for node in origins)])


def ours(path: Path) -> list[str]:
    """What a file imports of the packages, down to the file."""
    return [
        name for name in imports(path) if name.startswith(("holdfast.worker.", "holdfast.router.", "holdfast.cluster."))
    ]


def wrong_imports() -> list[str]:
    """Every import that goes up, or past a door."""
    wrong = []
    for path, name in sources().items():
        package, here = room(name)
        order = ("words", *ROOMS[package])
        for imported in ours(path):
            other, there = room(imported)
            if other == package:
                fine = order.index(there) <= order.index(here)
            elif other.startswith(f"{package}."):
                fine = order.index(other.removeprefix(f"{package}.")) < order.index(here)
            else:
                fine = there in DOORS.get(package, {}).get(other, ())
            if not fine:
                wrong.append(f"{name} imports {imported}")
    return wrong


def test_imports_go_down_only():
    assert not wrong_imports()


def test_rooms_load_only_what_they_may():
    for path, name in sources().items():
        package, here = room(name)
        never = NEVER_LOADS.get(package, set()) | NEVER_LOADS.get(f"{package}.{here}", set())
        loaded = {top.split(".")[0] for top in imports(path)}
        assert not loaded & never, f"{name} loads {loaded & never}"


def test_importing_the_router_loads_no_tensors():
    for path, name in sources().items():
        if room(name)[0] == "router":
            loaded = {top.split(".")[0] for top in imports(path, lazy=False)}
            assert not loaded & TENSORS, f"{name} loads {loaded & TENSORS}"


def test_the_compiler_driver_runs_before_anything_is_installed():
    """A package's build runs it by itself."""
    loaded = {name.split(".")[0] for name in imports(ROOT / "worker/decoder/cpu/build.py")}
    assert loaded <= sys.stdlib_module_names, loaded - sys.stdlib_module_names


def test_only_wires_import_the_stubs():
    for path, name in sources().items():
        if any(imported.startswith(("holdfast.v1", "holdfast.foreign")) for imported in imports(path)):
            assert ".".join(room(name)) in STUBS, name


def test_package_files_are_empty():
    for path in sources():
        assert path.name != "__init__.py" or path.read_text() == "", path


def test_every_folder_is_a_room():
    for package, rooms in ROOMS.items():
        folder = ROOT / package.replace(".", "/")
        folders = {path.name for path in folder.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
        assert folders <= set(rooms), f"{package} has folders that are no rooms: {folders - set(rooms)}"
