"""The floors of the house: packages and rooms import downward only, and what a room may load is data, here.

A room is a folder. The root of a package is a room too: plain data that all rooms above it may import. A room imports
from its own package only rooms on lower floors, and from another package only what `ALLOWED` lists.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("worker", "router", "cluster")
FLOORS = {  # from the ground up
    "worker": (
        ("worker",),
        ("worker/cache", "worker/executors", "worker/executors/gpu/kernels", "worker/wire"),
        ("worker/scheduler", "worker/executors/cpu", "worker/executors/gpu", "worker/models/formats"),
        ("worker/models",),
        ("worker/engine",),
        ("worker/replica",),
    ),
    "router": (
        ("router", "router/schemas"),
        ("router/overload", "router/security", "router/store", "router/wire"),
        ("router/text",),
        ("router/dispatch", "router/tools"),
        ("router/links", "router/requests"),
        ("router/api", "router/metrics"),
        ("router/api/grpc", "router/api/http"),
        ("router/api/open_inference", "router/api/vllm"),
        ("router/server",),
    ),
    "cluster": (
        (
            *("cluster", "cluster/bundled_model", "cluster/scaling"),
            *("cluster/simulate/kernel", "cluster/simulate/oracle", "cluster/verify"),
        ),
        ("cluster/client", "cluster/config"),
        ("cluster/bench", "cluster/front", "cluster/offline", "cluster/simulate/actors"),
        ("cluster/serve", "cluster/simulate/capacity", "cluster/simulate/world"),
        ("cluster/demo",),
        ("cluster/commands",),
    ),
}
ROOMS = {
    room: (package, number)
    for package, floors in FLOORS.items()
    for number, floor in enumerate(floors)
    for room in floor
}
ALLOWED = {  # rooms of other packages that a room, or a folder of rooms, may import; the longest prefix counts
    "worker": (),
    "router": ("worker", "worker/wire"),  # one codec and one lock of the link, for both of its ends
    "cluster": tuple(room for room, (package, _) in ROOMS.items() if package != "cluster"),
    "cluster/verify": ("worker",),
    "cluster/simulate": (
        *("worker", "worker/scheduler", "worker/engine", "worker/wire", "worker/replica"),
        *("router", "router/wire", "router/text", "router/dispatch", "router/overload", "router/security"),
        "router/requests",
    ),
}
TENSORS = {"torch", "transformers", "safetensors", "numpy"}
IO = {"asyncio", "grpc", "ray", "random", "secrets", "socket", "subprocess", "threading", "time"}
NEVER_LOADS = {  # by file or folder, for all below it
    "worker": {"ray"},
    "worker/cache": TENSORS | IO,
    "worker/scheduler": TENSORS | IO,
    **{f"worker/{room}": {"asyncio", "grpc"} for room in ("executors", "models", "engine")},
    "worker/executors/cpu": {"transformers"},
    "worker/executors/gpu": {"transformers"},
    "worker/models": {"ctypes", "fcntl", "subprocess"},
    "router": {"torch", "ray"},
    "router/tools": TENSORS | IO,
    "router/dispatch": TENSORS | IO,
    "router/overload": TENSORS | IO,
    "router/security": TENSORS | IO,  # keys are made by a command, and looked up at the time that is passed in
    "router/wire": TENSORS | (IO - {"grpc"}),
    "cluster/scaling": TENSORS | IO,
    "cluster/verify": TENSORS | {"grpc", "ray"},
    "cluster/simulate": TENSORS | (IO - {"random", "grpc"}),  # the retry policy names its codes
}
CORES = (  # files without IO in rooms that have some: the simulator runs them, or both ends of a wire read them
    "worker/engine/engine_core.py",
    "worker/engine/block_tier.py",
    "worker/engine/held_requests.py",
    "worker/engine/request_guards.py",
    "worker/engine/promises.py",
    "worker/engine/restore.py",
    "worker/engine/restores.py",
    "worker/engine/sendings.py",
    "worker/engine/tier_mover.py",
    "worker/replica/hang_verdict.py",
    "worker/wire/delta_pieces.py",
    "worker/wire/link_requests.py",
    "worker/wire/link_responses.py",
    "worker/wire/message_bounds.py",
    "worker/wire/sampling_fields.py",
    *(f"cluster/verify/{name}.py" for name in ("exchange", "compare", "subject", "purity", "semantics")),
    *(f"cluster/verify/{name}.py" for name in ("protocol", "structured", "numbers", "company")),
)
INTERNALS = {  # the file that uses a package's private modules and names, and says in which version they were read
    "ray": "cluster/serve/ray_internals.py",
    "grpc": "router/api/grpc/channelz.py",
    "torch": "worker/executors/tensor_parallel.py",
    "uvicorn": "router/api/http/server.py",
}
UNDOCUMENTED = {"ray": ("core", "serve.context"), "uvicorn": ("protocols",)}  # internals whose names have no underscore
STUBS = (
    *("worker/wire", "worker/replica", "router/wire", "router/links", "router/api", "cluster/client", "cluster/bench"),
)


@cache
def sources() -> dict[str, str]:
    """Every file of the packages by its path, with its dotted name."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [path.relative_to(ROOT) for path in found]
    return {str(name): "holdfast." + ".".join(name.with_suffix("").parts) for name in names}


@cache
def rooms_by_module() -> dict[str, str]:
    return {module: str(Path(path).parent) for path, module in sources().items()}


@cache
def imports(path: str, *, lazy: bool = True) -> frozenset[str]:
    """Dotted names of what a file imports; without `lazy`, only of what loading it imports."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
    functions = [node for node in nodes if not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    counted = [node for node in nodes if id(node) not in inside]
    plain = [alias.name for node in counted if isinstance(node, ast.Import) for alias in node.names]
    origins = [node for node in counted if isinstance(node, ast.ImportFrom)]
    assert not any(node.level for node in origins), f"{path}: a relative import"
    members = [f"{node.module}.{alias.name}" for node in origins for alias in node.names]
    modules = rooms_by_module()
    return frozenset([*plain, *(name for name in members if name in modules), *(node.module for node in origins)])


def below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def apis(room: str) -> tuple[str, ...]:
    return ALLOWED[max((folder for folder in ALLOWED if below(room, folder)), key=len)]


def may_import(room: str, other: str) -> bool:
    package, floor = ROOMS[room]
    other_package, other_floor = ROOMS[other]
    if package == other_package:
        return room == other or other_floor < floor
    return other in apis(room)


def test_every_folder_is_a_room_on_a_floor():
    assert {str(Path(path).parent) for path in sources() if not path.endswith("__init__.py")} == ROOMS.keys()


def test_imports_go_down_only():
    rooms = rooms_by_module()
    wrong = [
        f"{path} imports {imported}"
        for path in sources()
        for imported in imports(path)
        if imported in rooms and not may_import(str(Path(path).parent), rooms[imported])
    ]
    assert not wrong


def test_rooms_load_only_what_they_may():
    never = {**NEVER_LOADS, **dict.fromkeys(CORES, TENSORS | IO)}
    roots = {str(path.relative_to(ROOT)) for path in (ROOT / "worker").glob("*.py")}  # plain data
    never |= dict.fromkeys(roots, TENSORS | IO)
    for path in sources():
        forbidden = set().union(*(names for folder, names in never.items() if below(path, folder)))
        loaded = {top.split(".")[0] for top in imports(path)}
        assert not loaded & forbidden, f"{path} loads {loaded & forbidden}"


def loaded_with(path: str) -> set[str]:
    """Top names of all packages that importing a file loads, through Holdfast's own modules."""
    paths = {module: other for other, module in sources().items()}
    found, left = set[str](), [path]
    seen = {path}
    while left:
        for name in imports(left.pop(), lazy=False):
            found.add(name.split(".")[0])
            if name in paths and paths[name] not in seen:
                seen.add(paths[name])
                left.append(paths[name])
    return found


def test_importing_a_core_loads_no_tensors_in_any_way():
    for path in CORES:
        assert not loaded_with(path) & (TENSORS - {"numpy"}), path
    assert "torch" in loaded_with("worker/engine/adapters.py")


def test_importing_the_router_loads_no_tensors():
    for path in sources():
        if below(path, "router"):
            loaded = {top.split(".")[0] for top in imports(path, lazy=False)}
            assert not loaded & TENSORS, f"{path} loads {loaded & TENSORS}"


def test_the_compiler_driver_runs_before_anything_is_installed():
    """A package's build runs it by itself."""
    loaded = {name.split(".")[0] for name in imports("worker/executors/cpu/build.py")}
    assert loaded <= sys.stdlib_module_names, loaded - sys.stdlib_module_names


def test_only_wires_import_the_stubs():
    for path in sources():
        if any(imported.startswith(("holdfast.v1", "holdfast.foreign")) for imported in imports(path)):
            assert any(below(path, room) for room in STUBS), path


def test_package_files_are_empty():
    for path in sources():
        assert not path.endswith("__init__.py") or (ROOT / path).read_text() == "", path


def dotted_name(node: ast.expr) -> str:
    """`a.b.c`; of anything but names and their attributes an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    origin = dotted_name(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{origin}.{node.attr}" if origin else ""


def private_uses(source: str) -> set[str]:
    """Packages of `INTERNALS` of whose internals a file imports something, or reads it by a dotted name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted_name(node)]
        for package, _, rest in (name.partition(".") for name in names):
            parts = [part for part in rest.split(".") if not part.startswith("__")]
            is_hidden = any(rest.startswith(hidden) for hidden in UNDOCUMENTED.get(package, ()))
            if package in INTERNALS and (is_hidden or any(part.startswith("_") for part in parts)):
                found.add(package)
    return found


def test_internals_of_other_packages_are_used_in_one_file_each_which_names_the_version():
    for path in sources():
        text = (ROOT / path).read_text()
        for package in private_uses(text) if any(package in text for package in INTERNALS) else ():
            assert path == INTERNALS[package], f"{path} uses internals of {package}"
    for package, path in INTERNALS.items():
        source = (ROOT / path).read_text()
        assert package in private_uses(source)
        said = source.split('"""')[1]
        assert re.search(r"read\s+in\s+[A-Za-z]+\s+\d+\.\d+", said), f"{path} does not say in which version"


def test_a_planted_use_of_internals_is_found():
    planted = {
        "from ray._raylet import GcsClient": {"ray"},
        "import ray\nray._private.worker": {"ray"},
        "from ray.serve.context import _get_global_client": {"ray"},
        "import torch.distributed as dist\nimport torch\ntorch._C.x()": {"torch"},
        "from uvicorn.protocols.http.h11_impl import H11Protocol": {"uvicorn"},
        "import torch\ntorch.__version__\nimport ray.util": set(),
    }
    for source, packages in planted.items():
        assert private_uses(source) == packages
