"""Command `holdfast demo`: a local cluster, seen at work in under a minute."""


def demo() -> int:
    """Start a local cluster, stream four prompts at once over gRPC, print the figures, and stop it."""
    from holdfast.cluster.demo.run import main

    return main()
