"""Command `holdfast drain-node`: what a pod runs before it ends."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

Seconds = Annotated[float, Parameter(validator=Number(gte=0))]


def drain_node(*, notice_s: Seconds = 30.0, limit_s: Seconds = 600.0) -> int:
    """Drain the Ray node on this machine: end its routers and replicas gracefully, before the machine or pod goes away.

    Parameters
    ----------
    notice_s
        Seconds that Ray Serve has to start replacements on other nodes; then the processes here get SIGTERM.
    limit_s
        Timeout of the whole drain in seconds; longer than cluster.drain_timeout_s. The head waits for all other nodes.
    """
    from holdfast.cluster.serve.node_drain import drain_this_node

    if drain_this_node(notice_s, limit_s):
        return 0
    print(f"holdfast: routers or replicas still run on this node after {limit_s:g} s (--limit-s)")
    return 1
