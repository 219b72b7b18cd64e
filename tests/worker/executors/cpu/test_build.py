"""Libraries are compiled once and not used when they are stale; without a compiler a start is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cluster.offline.llm import LLM
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu import build, library
from tests.worker.executors.cpu.native import library_or_skip

ROOT = Path(__file__).parents[4]

COMPILER = """#!/bin/bash
# Writes its flags into object files, and object files into libraries; says in `calls` that it was called.
for word; do
    [ "$last" = -o ] && target=$word
    case $word in *.o) objects="$objects $word";; esac
    last=$word
done
echo "$target" >> "$(dirname "$0")/calls"
case $target in
    *.so) cat ${objects} > "$target";;
    *) echo "$@" > "$target";;
esac
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A folder with a g++ that takes no time; the machine has no other, nor libraries, nor a cache of them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    put(folder, COMPILER)
    monkeypatch.setenv("PATH", f"{folder}:{tmp_path / 'tools'}")
    tools(tmp_path / "tools")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(library, "INSTALLED", tmp_path / "libraries")
    return folder


def put(folder, script):
    (folder / "g++").write_text(script)
    (folder / "g++").chmod(0o755)


def tools(folder):
    folder.mkdir()
    for name in ("bash", "cat", "dirname", "sleep"):
        (folder / name).symlink_to(
            next(path for path in (Path("/bin") / name, Path("/usr/bin") / name) if path.exists())
        )


def calls(compiler):
    return [Path(line).name for line in (compiler / "calls").read_text().splitlines()]


def test_a_library_is_compiled_once(compiler):
    path = library.path_of("avx2")
    assert build.is_current(path)
    assert sorted(calls(compiler)) == sorted(
        [
            *(
                "avx2.so",
                "block_rows-avx2.o",
                "compact-any.o",
                "executor-avx2.o",
                "packing-any.o",
                "packing_units-any.o",
            ),
            *(
                "plain-avx2.o",
                "packing_adapters-any.o",
                "packing_codes-any.o",
                "pool-any.o",
                "quantize-any.o",
                "sampler-avx2.o",
                "search_codes-avx2.o",
            ),
        ]
    )
    assert library.path_of("avx2") == path
    assert len(calls(compiler)) == 13
    assert [entry.name for entry in path.parent.iterdir() if entry.name != ".lock"] == ["avx2.so"]


def test_each_definition_that_chooses_a_class_is_read_by_the_sources():
    sources = "".join(path.read_text() for path in build.SOURCES.iterdir() if path.suffix in (".h", ".cpp"))
    flags = {flag for own in (*build.CLASSES.values(), *build.IN_SOFTWARE.values()) for flag in own}
    defined = {flag.removeprefix("-D") for flag in flags if flag.startswith("-D")}
    assert {"NATIVE_AMX", "NATIVE_PAIRS", "NATIVE_VNNI"} <= defined
    assert {name for name in defined if not re.search(rf"\b{name}\b", sources)} == set()


def test_parts_that_classes_share_are_compiled_once(compiler, tmp_path):
    build.compile_libraries(tmp_path / "all")
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == [
        "amx.so",
        "avx2.so",
        "avx512.so",
        "avx512bf16.so",
    ]
    assert len(calls(compiler)) == len(set(calls(compiler))) == 4 + 4 + 2 + 2 + 2 + 2 + 2 + 7
    assert "plain-amx.o" not in calls(compiler)


class FakeLibrary:
    """A loaded library of a class, and what this machine and system say of its instructions."""

    def __init__(self, tiles_are_allowed: bool, pairs_agree: bool) -> None:
        self.native_allow_tiles = lambda: 0 if tiles_are_allowed else -1
        self.native_pairs_agree = lambda: int(pairs_agree)


@pytest.mark.parametrize(
    ("tiles_are_allowed", "pairs_agree", "chosen"),
    [(True, True, "amx"), (False, True, "avx512bf16"), (False, False, "avx512")],
)
def test_a_class_whose_instructions_cannot_be_used_gives_way(tiles_are_allowed, pairs_agree, chosen, monkeypatch):
    said = []
    monkeypatch.setattr(library.logger, "info", lambda *words: said.append(str(words)))
    loaded = {name: FakeLibrary(tiles_are_allowed, pairs_agree or name != "avx512bf16") for name in build.CLASSES}
    monkeypatch.setattr(library, "missing_instructions", lambda name: set())
    monkeypatch.setattr(library, "path_of", Path)
    monkeypatch.setattr(library, "CDLL", lambda path: loaded[path])
    monkeypatch.setattr(library, "_declared", lambda one: one)
    assert library.load_library.__wrapped__() is loaded[chosen]
    assert any("VDPBF16PS rounds in another way" in line for line in said) == (not pairs_agree)


@pytest.mark.parametrize("name", build.CLASSES)
def test_this_machine_rounds_pairs_as_two_multiply_adds(name):
    """Also where an instruction does it: a CPU that differs is served by another class, and this test says so."""
    assert library_or_skip(name).native_pairs_agree() == 1


def test_an_installed_library_is_used_if_it_is_not_stale(compiler):
    library.INSTALLED.mkdir()
    installed = library.INSTALLED / "avx2.so"
    installed.write_text("of other sources")
    assert library.path_of("avx2") != installed
    installed.write_text(f"of the digest {build.digest()}")
    assert library.path_of("avx2") == installed


def test_a_stale_library_in_the_cache_is_replaced(compiler):
    folder = library.cache_folder()
    folder.mkdir(parents=True)
    (folder / "avx2.so").write_text("written half")
    assert build.is_current(library.path_of("avx2"))


def test_the_digest_names_sources_and_flags(tmp_path, monkeypatch):
    before = build.digest()
    assert before == build.digest()
    assert before != build.digest(["-g"])
    copied = tmp_path / "native"
    copied.mkdir()
    for source in build.SOURCES.iterdir():
        (copied / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", copied)
    assert before == build.digest()
    (copied / "lanes.h").write_text((copied / "lanes.h").read_text() + "\n")
    assert before != build.digest()


ASK = """
from pathlib import Path
from holdfast.worker.executors.cpu import library
library.INSTALLED = Path("nowhere")
print(library.path_of("avx2").stat().st_size)
"""


def at_once(commands):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    started = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) for words in commands]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return outputs


def test_two_processes_that_need_a_library_at_once_compile_it_once(compiler):
    put(compiler, COMPILER.replace('echo "$target"', 'sleep 0.3; echo "$target"'))
    first, second = at_once([[sys.executable, "-c", ASK]] * 2)
    assert first == second
    assert len(calls(compiler)) == 13


def test_two_builds_into_one_folder_at_once_both_succeed(compiler, tmp_path):
    at_once([[sys.executable, build.__file__, str(tmp_path / "both"), "avx2"]] * 2)
    assert build.is_current(tmp_path / "both/avx2.so")
    assert len(calls(compiler)) == 26


def test_a_compilers_complaint_is_told(compiler, tmp_path):
    put(compiler, "#!/bin/bash\necho 'note: so and so' >&2\necho 'step.h:1: error: no such thing' >&2\nexit 1\n")
    with pytest.raises(
        library.Unavailable, match=r"g\+\+ cannot compile the native executor: step.h:1: error: no such"
    ):
        library.path_of("avx2")
    assert not list(library.cache_folder().glob("*.so"))


def test_without_a_compiler_it_is_said_what_to_do(compiler, monkeypatch):
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"purelib": "/nowhere"})
    (compiler / "g++").unlink()
    with pytest.raises(library.Unavailable, match=r"no C\+\+ compiler was found.*apt-get install g\+\+"):
        library.path_of("avx2")


def test_the_compiler_of_the_package_index_does_for_any_cpu(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    (compiler / "g++").unlink()
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang/zig").touch()
    assert build.find_compiler() == (str(tmp_path / "ziglang/zig"), "c++", "-target", "x86_64-linux-gnu")


def test_other_machines_are_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    with pytest.raises(build.NoCompilerError, match="Linux on x86-64, not on linux aarch64"):
        build.compile_libraries(tmp_path)


def test_a_machine_without_the_instructions_is_told_so(monkeypatch):
    monkeypatch.setattr(library, "runnable_classes", list)
    with pytest.raises(library.Unavailable, match="no AVX2"):
        library.load_library.__wrapped__()


def test_a_library_that_cannot_be_opened_is_named_with_the_reason(monkeypatch, tmp_path):
    """For want of memory, or on a file system that nothing is executed from."""
    broken = tmp_path / "avx2.so"
    broken.write_bytes(b"\x7fELF")
    monkeypatch.setattr(library, "path_of", lambda name: broken)
    with pytest.raises(library.Unavailable, match=rf"native library cannot be loaded: {broken}: file too short"):
        library.load_library.__wrapped__()


def test_without_a_compiler_a_start_is_refused_with_a_way_out(monkeypatch, tmp_path):
    def none():
        raise build.NoCompilerError("no C++ compiler was found (try: apt-get install g++)")

    monkeypatch.setattr(build, "find_compiler", none)
    monkeypatch.setattr(library, "INSTALLED", tmp_path / "libraries")
    monkeypatch.setenv("HOME", str(tmp_path))
    library.load_library.cache_clear()
    with pytest.raises(ConfigurationError, match=r"no native library for this CPU: no C\+\+ compiler .*apt-get"):
        LLM()
