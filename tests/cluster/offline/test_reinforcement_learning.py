"""The loop of docs/reinforcement-learning.md runs as it stands there."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reinforcement-learning.md"


def test_the_loop_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
