"""Command `holdfast demo`: a local cluster, seen at work in under a minute."""

from typing import Annotated

from cyclopts import Parameter


def demo(
    *,
    blackout: Annotated[
        bool,
        Parameter(negative=(), help="kill all processes of the cluster instead of one replica, and start it again"),
    ] = False,
    page: Annotated[
        bool,
        Parameter(negative=(), help="serve a web page with a chat and a kill button for each replica, until Ctrl-C"),
    ] = False,
) -> int:
    """Start a local cluster, stream four prompts at once over gRPC, print the figures, and stop it."""
    if page:
        return _serve_page()
    from holdfast.cluster.demo import run as dark
    from holdfast.cluster.demo.run import PARAMS, PROMPTS, main

    return dark.run(PROMPTS, PARAMS) if blackout else main()


def _serve_page() -> int:
    """A cluster of `holdfast serve` whose page has a button for each replica that kills it."""
    from holdfast.cluster.commands.serve import run
    from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
    from holdfast.router.config import RouterConfig

    config = HoldfastConfig(cluster=ClusterConfig(replicas=2), router=RouterConfig(killable=True))
    print(f"the page: http://127.0.0.1:{config.cluster.http_port}/ once it is ready; its buttons Kill end a replica")
    return run(config)
