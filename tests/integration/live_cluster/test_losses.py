"""What is lost or hangs: Ray's GCS, a rank, a leader, a router, the directory. Streams go on, and it is replaced."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

import psutil
import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.serve.directory import SETTLED_S
from holdfast.cluster.serve.start_up import Serving
from tests.integration import stock_clients
from tests.integration.processes import processes_named
from tests.integration.streams import Answer, Wish, ask, both_are_back, has_load, is_idle, long_wish, until
from tests.under_way import were_under_way

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

GCS = "gcs/gcs_server"
GONE_S = 20.0  # by itself, Serve waits for a silent process until its time to drain is over, which is longer


async def _strike(
    address: str, part: str, victim: psutil.Process, fault: signal.Signals
) -> tuple[list[Answer], list[Answer]]:
    """The answers to our clients while a process is lost, and after that. Stock clients are told the same as before."""
    started, undisturbed, struck = asyncio.Semaphore(0), await stock_clients.stock_texts(address), asyncio.Event()
    async with AsyncClient(address) as client:
        stock = asyncio.create_task(stock_clients.stock_texts(address, over=struck))

        async def tritons_are_open() -> bool:
            return (await client.get_load()).num_open >= 1 + stock_clients.NUM_TRITON

        await until(tritons_are_open, 30.0)
        streams = [asyncio.create_task(ask(client, long_wish(number), started.release)) for number in range(8)]
        for _ in range(8):
            await started.acquire()
        struck_s = time.monotonic()
        victim.send_signal(fault)
        struck.set()
        answers = await asyncio.gather(*streams)
        were_under_way([answer.arrivals_s for answer in answers], struck_s, at_least=4)
        assert await stock == undisturbed

        async def both_are_up() -> bool:
            others = [process for process in processes_named(part) if process != victim]
            return len(others) == 2 and (await client.list_models()).models[0].num_replicas == 2

        async def is_gone() -> bool:
            return not victim.is_running()

        await until(is_gone, GONE_S)
        await until(both_are_up, 180.0)
        print(f"the replica was back after {time.monotonic() - struck_s:.1f} s")
        later = await asyncio.gather(*(ask(client, long_wish(number)) for number in range(8)))
        await until(lambda: is_idle(client), 10.0)
    return answers, later


async def _lose_the_gcs(address: str, victim: psutil.Process) -> tuple[list[Answer], list[Answer]]:
    """The answers to streams that were under way when it died, and to those that began while it was away."""
    started = asyncio.Semaphore(0)

    async def is_back() -> bool:
        return any(process != victim for process in processes_named(GCS))

    async with AsyncClient(address) as client:
        streams = [asyncio.create_task(ask(client, long_wish(number), started.release)) for number in range(8)]
        for _ in range(8):
            await started.acquire()
        victim.kill()
        assert not any(stream.done() for stream in streams), "they were to be under way"
        later = await asyncio.gather(*(ask(client, long_wish(number)) for number in range(8)))
        await until(is_back, 60.0)
    return await asyncio.gather(*streams), later


def test_streams_go_on_while_rays_gcs_starts_again(cluster: Serving, expected: Callable[[list[Wish]], list[Answer]]):
    """In the processes in which they ran. What dies in the tests that follow is replaced through the new one."""
    import ray  # not before the cluster has been started: it closes Ray off only then

    (victim,) = processes_named(GCS)
    parts = (":Router", ":Replica", "RankActor")
    before = [processes_named(part) for part in parts]
    answers, later = asyncio.run(_lose_the_gcs(cluster.routers[0], victim))
    right = expected([long_wish(number) for number in range(8)])
    for answer, again, wanted in zip(answers, later, right, strict=True):
        assert answer.error is None
        assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
        assert (again.token_ids, again.text) == (wanted.token_ids, wanted.text)
    print(f"the longest pause within a stream was {max(answer.longest_pause_s for answer in answers):.2f} s")
    assert [processes_named(part) for part in parts] == before
    assert [node["Alive"] for node in ray.nodes()] == [True], "the new one knows what the old one knew"


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        pytest.param("RankActor", signal.SIGKILL, marks=pytest.mark.slow),
        (":Replica", signal.SIGKILL),
        pytest.param(":Replica", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(":Replica", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=["rank killed", "leader killed", "leader asked to end", "leader stopped"],
)
def test_streams_outlive_the_process_that_serves_them(
    part: str, fault: signal.Signals, cluster: Serving, expected: Callable[[list[Wish]], list[Answer]]
):
    """Its streams go on at the other replica. It is gone, also if it was only stopped, and replaced."""
    processes = processes_named(part)
    assert len(processes) == 2
    answers, later = asyncio.run(_strike(cluster.routers[0], part, processes[0], fault))
    right = expected([long_wish(number) for number in range(8)])
    for answer, again, wanted in zip(answers, later, right, strict=True):
        assert answer.error is None
        assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
        assert (again.token_ids, again.text) == (wanted.token_ids, wanted.text)
    print(f"the longest pause within a stream was {max(answer.longest_pause_s for answer in answers):.2f} s")
    assert len(processes_named(part)) == 2


def set_num_routers(number: int) -> None:
    """As the REST API of Serve does it, which our own Ray does not have."""
    import ray  # not before the cluster has been started: it closes Ray off only then
    from ray import serve
    from ray.serve._private.common import DeploymentID

    from holdfast.cluster.serve.app import ROUTER

    controller = serve.context._get_global_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(ROUTER, app_name="holdfast"), number))


def one_dies(routers: list[psutil.Process]) -> None:
    routers[0].kill()


def one_is_asked_to_end(routers: list[psutil.Process]) -> None:
    routers[0].terminate()


def one_is_stopped(routers: list[psutil.Process]) -> None:
    routers[0].suspend()


def one_is_not_wanted(routers: list[psutil.Process]) -> None:
    set_num_routers(1)


async def _ask_until(
    over: asyncio.Event, has_begun: asyncio.Event, address: str, others: Sequence[str], number: int
) -> list[Answer]:
    """One client that begins at a router, and all that it is told. `has_begun` is set by its first tokens."""
    answers: list[Answer] = []
    async with AsyncClient([address, *others], draw=lambda: 0.0) as client:
        while not over.is_set():
            answers.append(await ask(client, long_wish(number), has_begun.set))
    return answers


async def _lose_a_router(
    addresses: Sequence[str], routers: list[psutil.Process], strike: Callable[[list[psutil.Process]], None]
) -> list[list[Answer]]:
    """The answers to eight clients at two routers, before, while and after one of these goes."""
    over, begun = asyncio.Event(), [asyncio.Event() for _ in range(8)]
    clients = [
        asyncio.create_task(_ask_until(over, has_begun, addresses[number % 2], addresses, number))
        for number, has_begun in enumerate(begun)
    ]

    async def one_is_gone() -> bool:
        return not all(router.is_running() for router in routers)

    async with AsyncClient(addresses[0]) as first, AsyncClient(addresses[1]) as second:
        for client in (first, second):
            await until(lambda client=client: has_load(client, num_open=4), 10.0)
    for has_begun in begun:
        await has_begun.wait()
    struck_s = time.monotonic()
    strike(routers)
    await until(one_is_gone, GONE_S)
    print(f"the router was gone after {time.monotonic() - struck_s:.2f} s")
    over.set()
    message = await asyncio.gather(*clients)
    were_under_way([answer.arrivals_s for answers in message for answer in answers], struck_s, at_least=4)
    return message


SLOW_STRIKES = (one_is_asked_to_end, one_is_stopped, one_is_not_wanted)


@pytest.mark.parametrize("strike", [one_dies, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW_STRIKES)])
def test_streams_outlive_their_router(
    strike: Callable[[list[psutil.Process]], None],
    cluster: Serving,
    expected: Callable[[list[Wish]], list[Answer]],
):
    """It is gone within seconds, however long its drain might last."""
    routers = processes_named(":Router")
    assert len(routers) == 2
    message = asyncio.run(_lose_a_router(cluster.routers, routers, strike))
    for answers, wanted in zip(message, expected([long_wish(number) for number in range(8)]), strict=True):
        for answer in answers:
            assert answer.error is None
            assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
    pauses_s = [answer.longest_pause_s for answers in message for answer in answers]
    print(f"the longest pause within one of {len(pauses_s)} streams was {max(pauses_s):.2f} s")
    set_num_routers(2)
    asyncio.run(both_are_back(cluster.routers))


async def _lose_the_directory(address: str, victim: psutil.Process) -> list[list[Answer]]:
    async with AsyncClient(address) as client:
        started = asyncio.Semaphore(0)

        async def ask_eight() -> list[Answer]:
            return await asyncio.gather(*(ask(client, long_wish(number), started.release) for number in range(8)))

        async def is_replaced() -> bool:
            return any(process != victim for process in processes_named(":Directory"))

        running = asyncio.create_task(ask_eight())
        for _ in range(8):
            await started.acquire()
        struck_s = time.monotonic()
        victim.kill()
        without = await ask_eight()
        were_under_way([answer.arrivals_s for answer in await running], struck_s, at_least=4)
        await until(is_replaced, 60.0)
        await asyncio.sleep(2 * SETTLED_S)  # a directory that forgot replicas would have taken them away by now
        assert (await client.list_models()).models[0].num_replicas == 2
        return [await running, without, await ask_eight()]


@pytest.mark.slow  # without Ray, test_membership.py does it every time
def test_a_killed_directory_is_replaced_and_nobody_notices(
    cluster: Serving, expected: Callable[[list[Wish]], list[Answer]]
):
    (victim,) = processes_named(":Directory")
    right = [answer.token_ids for answer in expected([long_wish(number) for number in range(8)])]
    for answers in asyncio.run(_lose_the_directory(cluster.routers[0], victim)):
        assert [answer.token_ids for answer in answers] == right
