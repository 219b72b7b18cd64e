"""Process that `holdfast serve` keeps for a cluster of this machine.

What may live here: reading its settings, a line of JSON on standard input. What may not: what serving is (`serve.py`).
"""

import sys

from holdfast.cluster.commands.cli import exit_code
from holdfast.cluster.commands.serve import host
from holdfast.cluster.config.config import HoldfastConfig


def main() -> None:
    """Serves until a signal comes, or exits with `EXIT_LOST` when the Ray below is lost."""
    config = HoldfastConfig.model_validate_json(sys.stdin.readline())
    sys.exit(exit_code(lambda: host(config)))


if __name__ == "__main__":
    main()
