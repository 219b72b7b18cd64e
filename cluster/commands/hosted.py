"""Process that `holdfast serve` keeps for a cluster of this machine: one life of the cluster."""

import sys

from holdfast.cluster.commands.cli import exit_code
from holdfast.cluster.commands.serve import host
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.fork_server import forked_server


def main() -> None:
    """Serves until a signal comes, or exits with `EXIT_LOST` when the Ray below is lost."""
    with forked_server() as forks:
        config = HoldfastConfig.model_validate_json(sys.stdin.readline())
        sys.exit(exit_code(lambda: host(config, forks)))
