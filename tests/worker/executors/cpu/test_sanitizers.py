"""The native executor's own tests once more, compiled with sanitizers of memory and of threads."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.worker.executors.cpu import build
from holdfast.worker.executors.cpu.library import missing_instructions
from tests.worker.executors.cpu import sanitized

FOLDER = Path(__file__).parent
RUN = """
import sys
from pathlib import Path
import pytest
from tests.worker.executors.cpu import sanitized
library, *words = sys.argv[1:]
sanitized.use(Path(library))
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", *words]))
"""
CHOSEN = (
    "chunks_and_blocks_and_threads or plain_dtypes or many_sequences or copied or dirty or nan_in_one or chosen"
    " or merged or near_the_exact or heads_of_any_size or beside_it or every_byte or special_values"
    " or tokens_are_those_of_pytorch or definition or processors_are or logprobs_ranks or penalty_does or no_numbers"
    " or refused or head_knows or no_rows or equal_logits or any_top_k or searches_for or small_nucleus"
    " or sixteen_exponents or of_those_with_whole or answers_the_same or kept_whole"
    " or in_company_and_in_chunks or versions_of_peft"
    " or among_all or parted or stored_by_the_rule or blocks_and_threads_have"
    " or bits_of_the_rule or they_have_apart or known_ones or neighbours_and_slots or any_of_its_drafts"
    " or chunks_and_threads or company_and_in_chunks or beside_quantized"
    " or of_the_dequantized or those_of_torch or of_the_written_rule or of_the_format or where_products_read"
    " or states_of_the_whole or be_run_together or in_flight_have or told_apart"
    " or is_found or nan_is_refused or packed_matrices_are or any_type_and or xxh3 or of_a_block_wherever"
)
BF16_ALONE = (
    " and not equal_logits and not dtype1 and not dtype2 and not plain_dtypes and not a_long_context_is_near"
    " and not same_in_any_chunks and not stored_by and not odd_inputs"
    " and not float16 and not float32 and not plain_types and not another_bit"
    " and not neighbours_and_slots and not any_of_its_drafts and not beside_quantized"
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["avx2", "avx512bf16", "amx", "tiles2", "pairs2"])
def test_no_sanitizer_complains(name, tmp_path):
    if missing := missing_instructions(name):
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    if not sanitized.is_possible():
        pytest.skip("no g++")
    library = sanitized.compiled(tmp_path / name, name)
    chosen = f"({CHOSEN}){BF16_ALONE if name in build.IN_SOFTWARE else ''} and not slow"
    files = [
        str(FOLDER / f"test_{each}.py")
        for each in (
            "functions",
            "products",
            "attention",
            "bits",
            "compact_weights",
            "coded_weights",
            "sequences",
            "wanted_rows",
            "long_contexts",
            "pieces",
            "encoders",
            "int8_cache",
            "units",
            "known_answers",
            "delta_net",
            "short_conv",
            "adapters",
            "adapted_experts",
            "adapted_outputs",
            "families",
            "block_bytes",
            "row_digests",
            "sampler",
            "sampler_searches",
        )
    ]
    files.append(str(FOLDER.parents[1] / "models/formats/test_quantization_at_load.py"))  # codes, and numbers of codes
    words = [sys.executable, "-c", RUN, str(library), "-k", chosen, "-m", "not slow", *files]
    result = subprocess.run(words, env=sanitized.environment(), capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert "runtime error" not in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_threads_that_take_pieces_of_steps_do_not_race(tmp_path):
    if not sanitized.is_possible():
        pytest.skip("no g++")
    library = sanitized.compiled(tmp_path / "avx2", "avx2", "threads")
    words = [
        sys.executable,
        "-c",
        RUN,
        str(library),
        "-k",
        "states_of_the_whole or in_flight",
        str(FOLDER / "test_pieces.py"),
    ]
    if fixed := shutil.which("setarch"):
        words = [fixed, "-R", *words]  # it finds no place for its own memory otherwise
    result = subprocess.run(words, env=sanitized.environment("threads"), capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
