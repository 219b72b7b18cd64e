"""Which domain of fast links the ranks of a model go to: against every way of placing them, and on Ray's own nodes."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from holdfast.cluster.serve.rank_placement import DomainChoice, Node, choose_domains
from tests.examples import examples

LABEL = "nvidia.com/gpu.clique"
RANK = {"CPU": 1.0, "GPU": 1.0}


def node(domain: str | None, gpus: int, free: int | None = None, cpus: int = 8) -> Node:
    labels = {} if domain is None else {LABEL: domain}
    return Node(
        labels=labels,
        total={"CPU": float(cpus), "GPU": float(gpus)},
        free={"CPU": float(cpus), "GPU": float(gpus if free is None else free)},
    )


def chosen(num_ranks: int, num_replicas: int, nodes: Sequence[Node]) -> DomainChoice:
    return choose_domains(LABEL, RANK, num_ranks, num_replicas, nodes)


def test_a_replica_goes_to_the_domain_that_it_fills_best():
    nodes = [node("a", 8), node("a", 8), node("b", 4), node("b", 4), node(None, 4), node(None, 4)]
    assert chosen(8, 1, nodes) == DomainChoice(domains=("b",), is_one=True)
    assert chosen(16, 1, nodes).selector(LABEL) == {LABEL: "a"}


def test_what_others_use_counts_unless_no_domain_is_free():
    nodes = [node("a", 8), node("a", 8), node("b", 8, free=0), node("b", 4, free=4)]
    assert chosen(12, 1, nodes).domains == ("a",)
    used = [node("a", 8, free=3), node("a", 8, free=0), node("b", 4)]
    assert chosen(16, 1, used).domains == ("a",), "an update of what uses it frees it"


def test_across_domains_only_where_none_is_large_enough():
    nodes = [node("a", 4), node("a", 4), node("b", 4), node("b", 4), node("c", 2)]
    assert chosen(8, 2, nodes) == DomainChoice(domains=("a", "b"), is_one=False)
    assert chosen(8, 2, nodes).selector(LABEL) == {LABEL: "in(a,b)"}
    assert chosen(16, 1, nodes) == DomainChoice(domains=(), is_one=False)
    assert chosen(8, 1, []) == DomainChoice(domains=(), is_one=False)


def test_replicas_that_fit_on_nodes_are_not_crowded_into_a_domain():
    nodes = [node("a", 8), node("b", 8)]
    assert chosen(8, 2, nodes) == DomainChoice(domains=(), is_one=True)


# --- against every way of placing them ---


def can_hold(nodes: Sequence[tuple[int, int]], num_ranks: int, num_replicas: int) -> bool:
    """Whether all ranks find a place on nodes with so many CPUs and GPUs each: tried one way after the other."""
    ways = itertools.combinations_with_replacement(range(len(nodes)), num_ranks * num_replicas)
    return any(all(way.count(place) <= min(nodes[place]) for place in set(way)) for way in ways)


def shape(found: Node, *, free: bool) -> tuple[int, int]:
    room = found.free if free else found.total
    return int(room["CPU"]), int(room["GPU"])


NODES = st.lists(
    st.builds(
        lambda domain, gpus, used, cpus: node(domain, gpus, max(0, gpus - used), cpus),
        st.sampled_from(["a", "b", None]),
        st.integers(0, 3),
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    max_size=6,
)


@settings(max_examples=examples(400))
@given(nodes=NODES, num_ranks=st.integers(2, 3), num_replicas=st.integers(1, 2))
def test_the_choice_is_right_whatever_the_nodes(nodes, num_ranks, num_replicas):
    def holds(domain: str, number: int, *, free: bool) -> bool:
        inside = [shape(one, free=free) for one in nodes if one.labels.get(LABEL) == domain]
        return can_hold(inside, num_ranks, number)

    choice = chosen(num_ranks, num_replicas, nodes)
    names = sorted({one.labels[LABEL] for one in nodes if one.labels})
    free = [name for name in names if holds(name, num_replicas, free=True)]
    whole = [name for name in names if holds(name, num_replicas, free=False)]
    if free or whole:
        assert choice.is_one
        assert choice.domains[0] in (free or whole)
        assert len(choice.domains) == 1
    elif choice.is_one:
        on_nodes = sum(min(shape(one, free=False)) // num_ranks for one in nodes)
        assert not choice.domains
        assert on_nodes >= num_replicas, "each replica finds a node for itself"
    else:
        assert set(choice.domains) <= {name for name in names if holds(name, 1, free=False)}
        inside = [shape(one, free=False) for one in nodes if one.labels.get(LABEL) in choice.domains]
        assert not choice.domains or can_hold(inside, num_ranks, num_replicas), "Ray finds room for all of them there"


# --- on Ray's own nodes ---


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_ranks_lie_in_one_domain_of_ray_nodes(tmp_path: Path):
    """Two ranks, and four nodes with room for one: the ones with the same label are neither the first nor the last."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_MODE": "disabled"}
    results = tmp_path / "found.json"
    subprocess.run(
        [sys.executable, "-m", "tests.cluster.serve.labelled_nodes", str(results)], env=environ, check=True, timeout=240
    )
    found = json.loads(results.read_text())
    assert found["one domain"] == {"domains": ["fast", "fast"], "text": found["text"]}
    assert found["no domain has room"]["domains"] != ["fast", "fast"]
    assert "lie across domains" in found["no domain has room"]["warned"]
