"""Command `holdfast demo`: a local cluster, seen at work in under a minute."""

from typing import Annotated

from cyclopts import Parameter


def demo(
    *,
    blackout: Annotated[
        bool, Parameter(negative=(), help="kill every process of the cluster, not one replica, and start it again")
    ] = False,
) -> int:
    """Start a local cluster, stream four prompts at once over gRPC, print the figures, and stop it."""
    from holdfast.cluster.demo import blackout as dark
    from holdfast.cluster.demo.run import PARAMS, PROMPTS, main

    return dark.run(PROMPTS, PARAMS) if blackout else main()
