"""A replica of a quantized model is killed under its streams, which go on elsewhere with the same tokens."""

from pathlib import Path

import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.offline.llm import LLM
from holdfast.worker.models.native_backend import UNIT_NUMERICS
from holdfast.worker.models.quantized_folder import write_quantized
from tests import loops
from tests.chaos.command import served
from tests.chaos.test_states import WISHES, kill_one
from tests.parity.families import save_tiny_model
from tests.worker.models.gguf.files import write_model

SLOW_ENOUGH = {
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
"""For a kill to find it at work."""


def gguf_file(folder: Path) -> Path:
    """In Q4_1, but for values in Q8_0, so that queries, keys and values have several forms."""
    return write_model("llama", folder, "Q4_1", others={"attn_v": "Q8_0"}, **SLOW_ENOUGH).file


def compressed_tensors(folder: Path) -> Path:
    """W4A16, as `holdfast quantize` writes it."""
    plain = save_tiny_model("llama", folder / "plain", **SLOW_ENOUGH, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((bundled_path("demo") / name).read_bytes())
    write_quantized(plain, folder / "quantized", "int4")
    return folder / "quantized"


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [gguf_file, compressed_tensors])
def test_no_stream_notices_a_replica_that_is_killed(tmp_path, model):
    path = str(model(tmp_path))
    with LLM(path, max_model_len=1024) as llm:
        assert UNIT_NUMERICS in llm.info.fingerprint
        outputs = llm.generate([wish.prompt for wish in WISHES], [wish.params for wish in WISHES])
    with served(path, "--replicas", "2", "--routers", "1", "--max-model-len", "1024") as cluster:
        answers = loops.run(kill_one(cluster), timeout_s=120)
    assert [answer.token_ids for answer in answers] == [list(output.outputs[0].token_ids) for output in outputs]
    assert all(answer.error is None for answer in answers)
