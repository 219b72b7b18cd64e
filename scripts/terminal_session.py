"""Recorder of the terminal session of the README: `holdfast demo`, as an animated SVG (`docs/images/demo.svg`).

    pip install 'holdfast[recording]'
    python -m scripts.terminal_session [FILE]

What is recorded is what is typed: the cluster starts, streams, loses a replica and is compared with itself. It has a
terminal of its own, so it runs anywhere.
"""

import os
import pty
import shlex
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FILE: Final = ROOT / "docs" / "images" / "demo.svg"
SCREEN: Final = "110x30"
SHORTEST_FRAME_MS: Final = 150
LONGEST_FRAME_MS: Final = 3000
PAUSE_MS: Final = 6000
"""On the last frame, before it begins again."""


def command(file: Path) -> list[str]:
    """What records the demo into a file."""
    demo = [sys.executable, "-m", "holdfast.cluster.commands.cli", "demo"]
    return [
        *(sys.executable, "-m", "termtosvg", str(file)),
        *("-g", SCREEN, "-m", str(SHORTEST_FRAME_MS), "-M", str(LONGEST_FRAME_MS), "-D", str(PAUSE_MS)),
        *("-t", "window_frame", "-c", shlex.join(demo)),
    ]


def main() -> int:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    os.environ["TERM"] = "xterm-256color"
    code = os.waitstatus_to_exitcode(pty.spawn(command(file)))
    if code == 0:
        print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")
    return code


if __name__ == "__main__":
    sys.exit(main())
