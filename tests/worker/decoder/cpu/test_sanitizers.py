"""The native executor's own tests once more, compiled with AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.worker.decoder.cpu import build
from holdfast.worker.decoder.cpu.library import missing_instructions

FOLDER = Path(__file__).parent
FLAGS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
RUN = """
import sys
from pathlib import Path
import pytest
from holdfast.worker.decoder.cpu import library, sampler
from tests.worker.decoder.cpu import native
folder, *words = sys.argv[1:]
chosen = Path(folder).name
library.path_of = lambda name: Path(folder) / f"{chosen}.so"
load = library.load_library
native.load_library = sampler.load_library = lambda name=None: load(chosen)
native.ALL = ("avx2", chosen)
native.other_classes = lambda *_: [chosen]
from tests.worker.decoder.cpu import runs
runs.CpuExecutor.__init__.__globals__["load_library"] = lambda name=None: load(chosen)
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", *words]))
"""
CHOSEN = (
    "chunks_and_blocks_and_threads or plain_dtypes or many_sequences or copied or dirty or nan_in_one or chosen"
    " or merged or near_the_exact or heads_of_any_size or beside_it or every_byte or special_values"
    " or tokens_are_those_of_pytorch or definition or processors_are or logprobs_ranks or penalty_does or no_numbers"
    " or refused or head_knows or no_rows or equal_logits or any_top_k or searches_for or small_nucleus"
    " or sixteen_exponents or of_those_with_whole or answers_the_same or kept_whole"
    " or among_all or parted"
)
BF16_ALONE = " and not equal_logits and not dtype1 and not dtype2 and not plain_dtypes and not a_long_context_is_near"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["avx2", "avx512bf16", "amx", "tiles2", "pairs2"])
def test_no_sanitizer_complains(name, tmp_path):
    if missing := missing_instructions(name):
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    if not shutil.which("g++"):
        pytest.skip("no g++")
    folder = tmp_path / name
    build.compile_libraries(folder, [name], FLAGS)
    runtimes = [
        subprocess.check_output(["g++", f"-print-file-name={lib}"], text=True).strip()
        for lib in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",  # leaks would be the interpreter's
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    chosen = f"({CHOSEN}){BF16_ALONE if name in build.IN_SOFTWARE else ''} and not slow"
    files = [
        str(FOLDER / f"test_{each}.py")
        for each in (
            "functions",
            "products",
            "bits",
            "compact_weights",
            "sequences",
            "wanted_rows",
            "long_contexts",
            "families",
            "sampler",
            "sampler_searches",
        )
    ]
    words = [sys.executable, "-c", RUN, str(folder), "-k", chosen, "-m", "not slow", *files]
    result = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert "runtime error" not in result.stdout + result.stderr
