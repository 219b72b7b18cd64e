"""Domains of fast links between nodes, such as NVLink domains: which of them the ranks of a model are placed in.

A label of the nodes names them (`cluster.domain_label`): nodes with equal values are one domain. What may live here:
the choice, over a table of nodes, and reading that table. What may not: placing (`placement_groups.py`, Serve).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray

from holdfast.cluster.serve.placement_groups import Resources, ranks_that_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node: what it has, and what of that nobody uses now."""

    labels: Mapping[str, str]
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainChoice:
    """Where a model's ranks may lie."""

    domains: tuple[str, ...]
    """Values of the label; none: on any nodes."""
    is_one: bool
    """Whether each replica is sure to lie in one domain."""

    def selector(self, label: str) -> dict[str, str]:
        """As Ray selects nodes."""
        if not self.domains:
            return {}
        return {label: self.domains[0] if len(self.domains) == 1 else f"in({','.join(self.domains)})"}


def choose_domains(
    label: str, bundle: Resources, num_ranks: int, num_replicas: int, nodes: Sequence[Node]
) -> DomainChoice:
    """One domain for all replicas of `num_ranks` ranks: the one that they fill best, so that larger ones stay free.

    What is free counts before what there is: a rolling update frees what it takes. Where no domain has room for all of
    them, Ray may take any that has room for one, and then a replica may lie across two. Where no domain has even that,
    or all replicas fit on single nodes, the label decides nothing.
    """
    domains: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        if label in node.labels:
            domains[node.labels[label]].append(node)
    free = {name: _num_replicas((node.free for node in found), bundle, num_ranks) for name, found in domains.items()}
    total = {name: _num_replicas((node.total for node in found), bundle, num_ranks) for name, found in domains.items()}
    for room in (free, total):
        fitting = [(whole, name) for name, whole in room.items() if whole >= num_replicas]
        if fitting:
            return DomainChoice(domains=(min(fitting)[1],), is_one=True)
    if sum(ranks_that_fit(node.total, bundle) // num_ranks for node in nodes) >= num_replicas:
        return DomainChoice(domains=(), is_one=True)
    possible = tuple(sorted(name for name, whole in total.items() if whole))
    enough = sum(total[name] for name in possible) >= num_replicas
    return DomainChoice(domains=possible if enough else (), is_one=False)


def _num_replicas(nodes: Iterable[Resources], bundle: Resources, num_ranks: int) -> int:
    return sum(ranks_that_fit(node, bundle) for node in nodes) // num_ranks


def known_nodes(selector: Mapping[str, str]) -> list[Node]:
    """The living nodes that ranks may run on, of the cluster that this process is connected to."""
    from ray._private.state import available_resources_per_node
    from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]  # compiled

    free = available_resources_per_node()
    return [
        Node(labels=node["Labels"], total=node["Resources"], free=free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"] and node_labels_match_selector(node["Labels"], dict(selector))
    ]


def domains_of(label: str, node_ids: Collection[str]) -> set[str]:
    """The domains that these nodes are in; a node without the label is one by itself."""
    return {node["Labels"].get(label, node["NodeID"]) for node in ray.nodes() if node["NodeID"] in set(node_ids)}
