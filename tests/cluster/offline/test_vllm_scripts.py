"""Scripts in vLLM's style run with their import lines changed alone."""

import re
from pathlib import Path

import pytest

from holdfast.cluster.offline.llm import LLM

SCRIPTS = sorted((Path(__file__).parent / "vllm_scripts").glob("*.py"))
IMPORT = re.compile(r"^from vllm(\.\w+)* import ", re.MULTILINE)


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """Scripts end with their process; here, what they have loaded ends with them."""
    loaded: list[LLM] = []
    begin = LLM.__init__

    def remember(self: LLM, *args: object, **settings: object) -> None:
        begin(self, *args, **{"num_threads": 1, "num_blocks": 128, **settings})
        loaded.append(self)

    monkeypatch.setattr(LLM, "__init__", remember)
    yield
    for llm in loaded:
        llm.close()


@pytest.mark.filterwarnings("ignore:LLM")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs(script: Path):
    text, num_changed = IMPORT.subn("from holdfast import ", script.read_text())
    assert num_changed
    exec(compile(text, str(script), "exec"), {"__name__": "__main__"})


def test_there_are_twenty():
    assert len(SCRIPTS) >= 20
