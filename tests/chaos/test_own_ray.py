"""No stream notices when a process of a cluster's own Ray dies or hangs; the end of its raylet costs a restart."""

from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.own_ray import CONTROLLER, DIRECTORY, GCS, RAYLET, OwnRay, own_ray, shown
from tests.chaos.tally import Tally

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[OwnRay]:
    with own_ray() as running:
        yield running


FAULTS = {
    "SIGKILL of Ray's GCS": lambda cluster: [lambda: cluster.kill(GCS)],
    "SIGKILL of Ray's GCS, three times": lambda cluster: [lambda: cluster.kill(GCS)] * 3,
    "SIGSTOP of Ray's GCS": lambda cluster: [lambda: cluster.hang(GCS)],
    "SIGKILL of Serve's controller": lambda cluster: [lambda: cluster.kill(CONTROLLER)],
    "SIGKILL of the directory": lambda cluster: [lambda: cluster.kill(DIRECTORY)],
    "SIGKILL of the fork server": lambda cluster: [cluster.kill_fork_server],
    "SIGKILL of controller, directory and GCS": lambda cluster: [
        lambda: cluster.kill(CONTROLLER),
        lambda: cluster.kill(DIRECTORY),
        lambda: cluster.kill(GCS),
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_streams_go_on_without_the_control_plane(cluster: OwnRay, tally: Tally, name: str):
    """Routers and replicas are the same processes as before, and what dies afterwards is replaced."""
    effect = cluster.strike(*FAULTS[name](cluster))
    tally.add(name, effect.row)
    print(shown(name, effect))
    assert effect.row.num_streams > 0
    assert effect.row.is_clean, effect.row.differences
    assert effect.after == effect.before
    print(f"a replica that died afterwards served again after {cluster.replaces_a_replica():.1f} s")


def test_ray_has_no_agents_and_nothing_that_we_do_not_use(cluster: OwnRay):
    """Less that can die, less that starts, and fewer ports."""
    running = [" ".join(process.cmdline()) for process in cluster.command.descendants()]
    unused = ("DashboardAgent", "RuntimeEnvAgent", "dashboard.py", "monitor.py")
    assert [line for line in running if any(word in line for word in unused) and "agent_stand_in" not in line] == []


def test_streams_go_on_after_the_end_of_the_raylet(cluster: OwnRay, tally: Tally):
    """All processes end with it, and the command starts all of them again."""

    def end() -> None:
        before = cluster.data_plane()
        cluster.one(RAYLET).kill()
        psutil.wait_procs([psutil.Process(pid) for pid in before if psutil.pid_exists(pid)], 60)

    effect = cluster.strike(end)
    tally.add("SIGKILL of the raylet", effect.row)
    print(shown("SIGKILL of the raylet", effect))
    assert effect.row.num_streams > 0
    assert effect.row.is_clean, effect.row.differences
    assert not effect.after & effect.before
