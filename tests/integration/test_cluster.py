import asyncio
import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.cluster.bundled_model import bundled_model
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.serve import models
from holdfast.cluster.serve.directory import SETTLED_S
from holdfast.cluster.serve.serving import Serving, add_model
from holdfast.worker.decoder.cpu.shared_weights import shares_large_pages
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams
from tests.integration import elastic, stock_clients
from tests.integration import models_at_run_time as run_time
from tests.integration import operations_at_run_time as operations
from tests.integration import updates_at_run_time as updates
from tests.integration.processes import processes_named, ray_processes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

NUM_STREAMS = 64
GONE_S = 20.0  # by itself, Serve waits for a silent process until its time to drain is over, which is longer
WORDS = ("The capital of France is", "Monday, Tuesday,", "Three plus four is", "What is the currency of Japan?")


@dataclass(frozen=True)
class Wish:
    """A request, and after how many tokens its client goes away (None: it stays)."""

    prompt: str
    params: SamplingParams
    leaves_after: int | None = None


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: HoldfastError | None = None
    last_s: float = 0.0
    longest_pause_s: float = 0.0


def wish(number: int) -> Wish:
    """Greedy and seeded, short and long; one in three leaves midway."""
    greedy = number % 2 == 0
    params = SamplingParams(
        temperature=0.0 if greedy else 0.8,
        top_k=0 if greedy else 20,
        seed=number,
        max_tokens=16 + number % 17,
        ignore_eos=True,
    )
    return Wish(f"{number}. {WORDS[number % len(WORDS)]}", params, leaves_after=4 if number % 3 == 0 else None)


LONG_KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 2},
    {"temperature": 0.8, "structured_outputs": {"regex": "[a-z ,.]{150,400}"}, "ignore_eos": False},
    {"temperature": 0.9, "stop": ["zebra", "qu"], "min_tokens": 60, "logit_bias": {5: 1.0}, "bad_words": ["the"]},
)


def long_wish(number: int) -> Wish:
    """One of each kind of request: plain, penalized, structured, and with text that is held back."""
    kind = {"seed": number % len(WORDS), "max_tokens": 150, "ignore_eos": True} | LONG_KINDS[number % len(LONG_KINDS)]
    return Wish(WORDS[number % len(WORDS)], SamplingParams(**kind))


@pytest.fixture(scope="module")
def expected() -> Callable[[list[Wish]], list[Answer]]:
    """What one process without Ray or gRPC answers, at the same tensor-parallel degree."""
    wishes = [wish(number) for number in range(NUM_STREAMS)] + [long_wish(number) for number in range(len(WORDS))]
    with LLM("demo", tensor_parallel_size=2, num_threads=1) as llm:
        outputs = llm.generate([wish.prompt for wish in wishes], [wish.params for wish in wishes])
    answers = {}
    for made, output in zip(wishes, outputs, strict=True):
        completion = output.outputs[0]
        answers[made] = Answer(completion.token_ids, completion.text, FinishReason(str(completion.finish_reason)))
    return lambda wanted: [answers[made] for made in wanted]


async def ask(client: AsyncClient, wish: Wish, on_first: Callable[[], None] = lambda: None) -> Answer:
    answer = Answer()
    try:
        async for chunk in client.stream(wish.prompt, wish.params):
            assert chunk.first_token_index == len(answer.token_ids)
            answer.token_ids += chunk.token_ids
            answer.text += chunk.text
            answer.finish_reason = chunk.finish_reason
            now_s = time.monotonic()
            answer.longest_pause_s = max(answer.longest_pause_s, now_s - (answer.last_s or now_s))
            answer.last_s = now_s
            on_first()
            if wish.leaves_after is not None and len(answer.token_ids) >= wish.leaves_after:
                break
    except HoldfastError as error:
        answer.error = error
    return answer


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def is_idle(client: AsyncClient) -> bool:
    """No request is open, nothing runs or waits, and every block is free."""
    load = await client.get_load()
    replicas_idle = [
        (replica.num_running, replica.num_waiting) == (0, 0) and replica.num_free_blocks == replica.num_total_blocks
        for replica in load.replicas
    ]
    return load.num_open == 0 and len(replicas_idle) == 2 and all(replicas_idle)


async def _sixty_four_streams(address: str) -> list[Answer]:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(ask(client, wish(number)) for number in range(NUM_STREAMS)))
        await until(lambda: is_idle(client), 10.0)
    return answers


def test_64_streams_are_right_and_those_that_are_cut_leak_nothing(
    cluster: Serving, expected: Callable[[list[Wish]], list[Answer]]
):
    processes = {process.pid for process in ray_processes()}
    wishes = [wish(number) for number in range(NUM_STREAMS)]
    answers = asyncio.run(_sixty_four_streams(cluster.routers[0]))
    num_whole = 0
    for made, answer, right in zip(wishes, answers, expected(wishes), strict=True):
        assert answer.error is None
        if made.leaves_after is None:
            assert (answer.token_ids, answer.text, answer.finish_reason) == (
                right.token_ids,
                right.text,
                right.finish_reason,
            )
            num_whole += 1
        else:
            assert answer.token_ids == right.token_ids[: len(answer.token_ids)]
    assert num_whole == 42
    assert {process.pid for process in ray_processes()} == processes


async def _both_replicas_work(address: str) -> int:
    async with AsyncClient(address) as client:
        answers = asyncio.gather(*(ask(client, long_wish(number)) for number in range(16)))
        busy: set[str] = set()
        while len(busy) < 2:
            load = await client.get_load()
            busy |= {replica.replica_id for replica in load.replicas if replica.num_running > 0}
            await asyncio.sleep(0.01)
        await answers
        return len(busy)


def test_both_replicas_share_the_work(cluster: Serving):
    assert asyncio.run(asyncio.wait_for(_both_replicas_work(cluster.routers[0]), 60)) == 2


async def _strike(address: str, victim: psutil.Process, fault: signal.Signals) -> tuple[list[Answer], list[Answer]]:
    """The answers to our clients while a process is lost, and after that. Stock clients are told the same as before."""
    started, undisturbed = asyncio.Semaphore(0), await stock_clients.stock_texts(address)
    async with AsyncClient(address) as client:
        stock = asyncio.create_task(stock_clients.stock_texts(address))
        await until(lambda: _has(client, num_open=stock_clients.NUM_OPEN), 30.0)
        streams = [asyncio.create_task(ask(client, long_wish(number), started.release)) for number in range(8)]
        for _ in range(8):
            await started.acquire()
        struck_s = time.monotonic()
        victim.send_signal(fault)
        answers = await asyncio.gather(*streams)
        assert await stock == undisturbed

        async def both_are_up() -> bool:
            return (await client.list_models()).models[0].num_replicas == 2

        async def is_gone() -> bool:
            return not victim.is_running()

        await until(lambda: _not(both_are_up), 10.0)
        await until(is_gone, GONE_S)
        await until(both_are_up, 180.0)
        print(f"the replica was back after {time.monotonic() - struck_s:.1f} s")
        later = await asyncio.gather(*(ask(client, long_wish(number)) for number in range(8)))
        await until(lambda: is_idle(client), 10.0)
    return answers, later


async def _not(condition: Callable[[], Awaitable[bool]]) -> bool:
    return not await condition()


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
    answers, later = asyncio.run(_strike(cluster.routers[0], processes[0], fault))
    right = expected([long_wish(number) for number in range(8)])
    for answer, again, wanted in zip(answers, later, right, strict=True):
        assert answer.error is None
        assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
        assert (again.token_ids, again.text) == (wanted.token_ids, wanted.text)
    print(f"the longest pause within a stream was {max(answer.longest_pause_s for answer in answers):.2f} s")
    assert len(processes_named(part)) == 2


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[SamplingParams], str]]:
    """What one process answers to `run_time.PROMPT` with one rank."""
    with LLM("demo", num_threads=1) as llm:
        yield lambda params: llm.generate(run_time.PROMPT, params)[0].outputs[0].text


@pytest.mark.slow
def test_a_model_comes_and_goes_while_the_others_serve(cluster: Serving, alone: Callable[[SamplingParams], str]):
    """By the command line, on a Ray that counts no CPU for it. Its last stream ends normally, later ones by name."""
    assert "demo  running  replicas=2" in run_time.models("list").stdout
    refused = run_time.models("add", "demo")
    assert (refused.returncode, "has a model of this name already" in refused.stderr) == (2, True)
    template = "{% for m in messages %}The capital of {{ m.content }} is{% endfor %}"  # as PROMPT asks
    added = run_time.models("add", "demo", "--served-model-name", "other", "--chat-template", template)
    assert added.returncode == 0, added.stderr
    assert "other is served by 1 replica" in added.stdout
    both = {"demo": 2, "other": 1}
    assert asyncio.run(run_time.served_models(cluster.routers)) == [both, both]
    for router in cluster.routers:
        assert asyncio.run(run_time.answer_of(router, "other", run_time.SHORT)) == alone(run_time.SHORT)
        assert asyncio.run(run_time.chat_answer_of(router, "other", "France", run_time.SHORT)) == alone(run_time.SHORT)
    text, said, unknown = asyncio.run(run_time.streams_through_a_removal(cluster.routers[0], "other"))
    assert said.returncode == 0, said.stderr
    assert text == alone(run_time.LONG)
    assert unknown == "model 'other' is not served here; served: demo"
    assert asyncio.run(run_time.served_models(cluster.routers)) == [{"demo": 2}, {"demo": 2}]
    again = run_time.models("remove", "other")
    assert (again.returncode, "'other' is not served here; served: demo" in again.stderr) == (2, True)


@pytest.mark.slow
def test_replicas_follow_the_load_and_no_stream_notices(cluster: Serving, alone: Callable[[SamplingParams], str]):
    """1 to 3 to 1 to 0 to 1 under traffic: every stream is whole, and as one process answers."""
    right = functools.cache(alone)
    right(elastic.GREEDY), right(elastic.DRAWN)
    assert add_model(elastic.config(), lambda phase, done, total: None) == 1
    try:
        traffic, times = asyncio.run(elastic.grows_and_shrinks(cluster.routers, right))
    finally:
        models.remove("holdfast", elastic.NAME, 60.0)
    print("seconds:", {name: round(value, 1) for name, value in times.items()}, traffic.num_whole, "streams")
    assert traffic.wrong == []
    assert traffic.num_whole > elastic.NUM_CLIENTS


def tokens_of(folder: str, streams: Sequence[updates.Stream]) -> list[list[int]]:
    """What one process gives for the same requests, of which there are a few different ones."""
    wishes = list({(one.prompt, one.params) for one in streams})
    with LLM(folder, num_threads=1) as llm:
        outputs = llm.generate([prompt for prompt, _ in wishes], [params for _, params in wishes])
    found = {wish: output.outputs[0].token_ids for wish, output in zip(wishes, outputs, strict=True)}
    return [found[one.prompt, one.params] for one in streams]


@pytest.mark.slow
def test_an_update_ends_no_stream_and_changes_none(cluster: Serving, tmp_path: Path):
    """Other weights under a name while streams run: each is of one version. Then a canary that answers wrongly."""
    folders = [str(Path(bundled_model.__file__).parent / name) for name in ("model", "draft")]
    added = run_time.models("add", "demo", "--served-model-name", "other", "--replicas", "2")
    assert added.returncode == 0, added.stderr
    try:
        command = ("update", "other", "--model", folders[1])
        said, streams = asyncio.run(updates.traffic_during(cluster.routers, "other", *command))
        assert said.returncode == 0, said.stderr
        print(f"{said.stdout}{len(streams)} streams")
        assert [one.error for one in streams if one.error is not None] == []
        assert all(len(one.versions) == 1 and one.is_guaranteed for one in streams)
        old, new = streams[0].version, streams[-1].version
        assert {one.version for one in streams} == {old, new}
        assert old != new
        assert f"version {new} serves with 2 replicas; it was {old}" in said.stdout
        for version, folder in zip((old, new), folders, strict=True):
            of_version = [one for one in streams if one.version == version]
            assert [one.token_ids for one in of_version] == tokens_of(folder, of_version)
        right = updates.answer(cluster.routers[0], "other")
        known = tmp_path / "known.json"
        known.write_text(json.dumps([{"prompt": run_time.PROMPT, "starts_with": "no such answer"}]))
        canary = ("--canary", "0.5", "--known-answers", str(known))
        command = ("update", "other", "--model", folders[0], *canary)
        said, streams = asyncio.run(updates.traffic_during(cluster.routers, "other", *command))
        assert (said.returncode, "was taken back: 1 wrong known answers" in said.stderr) == (1, True), said.stderr
        assert [one.error for one in streams if one.error is not None] == []
        assert all(len(one.versions) == 1 and one.is_guaranteed for one in streams)
        assert updates.answer(cluster.routers[1], "other") == right
        assert streams[-1].version == new
    finally:
        removed = run_time.models("remove", "other")
    assert removed.returncode == 0, removed.stderr


@pytest.mark.slow
def test_operators_are_obeyed_by_all_routers(cluster: Serving, tmp_path: Path):
    """A pause and a drain are ordered at one router and hold at the other; a configuration is shown, then applied."""
    first, second = cluster.routers
    text = updates.answer(second, "demo")
    assert asyncio.run(operations.asked_while_paused(cluster.routers, "demo")) == (True, text)
    name = operations.dumped(first)["replicas"][0]["replica_id"]
    assert operations.holdfast("drain", name, "--server", first).returncode == 0
    asyncio.run(operations.until_all(cluster.routers, lambda state: retiring(state) == {name}))
    assert updates.answer(second, "demo") == text
    assert operations.holdfast("undrain", name, "--server", second).returncode == 0
    asyncio.run(operations.until_all(cluster.routers, lambda state: retiring(state) == set()))
    refused = operations.holdfast("drain", "nobody", "--server", first)
    assert (refused.returncode, "replica_id = 'nobody': must be one of" in refused.stderr) == (2, True)
    entries = [{"model": {"model": "demo"}, "replicas": 2, "parallel": {"tensor_parallel_size": 2}}]
    wanted = tmp_path / "wanted.yaml"
    wanted.write_text(json.dumps({"cluster": {"models": entries}}))
    assert operations.apply(str(wanted), "--dry-run").stdout == "nothing differs\n"
    entries.append({"model": {"model": "demo", "served_model_name": "other"}})
    wanted.write_text(json.dumps({"cluster": {"models": entries}}))
    shown = operations.apply(str(wanted), "--dry-run")
    assert (shown.returncode, ["other", "add"]) == (0, shown.stdout.split("\n")[1].split()[:2]), shown.stdout
    unsure = operations.apply(str(wanted))
    assert (unsure.returncode, "--yes" in unsure.stderr) == (2, True)
    done = operations.apply(str(wanted), "--yes")
    assert (done.returncode, "done: add other" in done.stdout) == (0, True), done.stderr
    assert updates.answer(first, "other") == updates.answer(second, "other")
    entries.pop()
    wanted.write_text(json.dumps({"cluster": {"models": entries}}))
    done = operations.apply(str(wanted), "--yes")
    assert (done.returncode, "done: remove other" in done.stdout) == (0, True), done.stderr
    assert asyncio.run(run_time.served_models(cluster.routers)) == [{"demo": 2}, {"demo": 2}]


@pytest.mark.slow
def test_other_settings_of_routers_end_no_stream(cluster: Serving, tmp_path: Path):
    """Routers are replaced one after the other under streams, at the same addresses."""
    entry = {"model": {"model": "demo"}, "replicas": 2, "parallel": {"tensor_parallel_size": 2}}

    def wanted(**sections: dict) -> str:
        path = tmp_path / "wanted.yaml"
        path.write_text(json.dumps({"cluster": {"models": [entry]}, **sections}))
        return str(path)

    def applied(*arguments: str, **sections: dict) -> tuple[Any, list[updates.Stream]]:
        act = functools.partial(operations.apply, wanted(**sections), *arguments)
        return asyncio.run(updates.traffic_while(cluster.routers, "demo", act))

    said, streams = applied("--yes", limits={"max_queued": 77})
    print(f"{said.stdout}{len(streams)} streams")
    assert (said.returncode, "done: replace routers" in said.stdout) == (0, True), said.stderr
    assert [one.error for one in streams if one.error is not None] == []
    folder = str(Path(bundled_model.__file__).parent / "model")
    assert [one.token_ids for one in streams] == tokens_of(folder, streams)
    assert [queue_length(router) for router in cluster.routers] == [77, 77]
    assert operations.apply(wanted(limits={"max_queued": 77}), "--dry-run").stdout == "nothing differs\n"
    said, streams = applied("--yes")
    assert said.returncode == 0, said.stderr
    assert [one.error for one in streams if one.error is not None] == []
    assert [queue_length(router) for router in cluster.routers] == [1024, 1024]


def queue_length(router: str) -> int:
    return operations.dumped(router)["settings"]["limits"]["max_queued"]


def retiring(state: dict) -> set[str]:
    return {one["replica_id"] for one in state["replicas"] if one["is_retiring"]}


@pytest.mark.skipif(not shares_large_pages(), reason="shared memory gets no large pages here")
def test_replicas_have_their_packed_weights_in_memory_once(cluster: Serving):
    """Each rank of one replica has the memory file of the same rank of the other."""
    holders: dict[int, set[int]] = {}
    for process in processes_named(":Replica") + processes_named("RankActor"):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            if "memfd:holdfast-weights-" in os.readlink(descriptor):
                holders.setdefault(descriptor.stat().st_ino, set()).add(process.pid)
    assert [len(pids) for pids in holders.values()] == [2, 2]


def test_gateways_drive_each_replica(cluster: Serving):
    tokens = asyncio.run(stock_clients.tokens_of(cluster.routers[0], 16))
    engines = asyncio.run(engines_of_all_replicas(len(cluster.engines)))
    for engine in engines:
        assert asyncio.run(stock_clients.by_a_gateway(engine, 16)) == ("demo", tokens)


async def engines_of_all_replicas(num_replicas: int) -> Sequence[str]:
    """Where the replicas' engines listen, once those that other tests killed are forgotten and replaced."""

    async def listed() -> Sequence[str]:
        (model,) = await asyncio.to_thread(models.list_models, "holdfast")
        return model.engines

    async def are_listed() -> bool:
        return len(await listed()) == num_replicas

    await until(are_listed, timeout_s=60)
    return await listed()


def test_deployments_of_others_ask_by_handle(cluster: Serving):
    from ray import serve  # not before the cluster has been started: it closes Ray off only then

    run_time.deploy_a_caller()
    caller = serve.get_app_handle("someone")
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    text = asyncio.run(run_time.answer_of(cluster.routers[0], "demo", run_time.SHORT))
    assert caller.whole.remote(run_time.PROMPT, greedy).result(timeout_s=60) == text
    streamed = caller.streamed.remote(run_time.PROMPT, greedy).result(timeout_s=60)
    assert "".join(streamed) == text
    assert len(streamed) > 1
    refusal = caller.refused.remote(run_time.PROMPT, {"temperature": -1.0}).result(timeout_s=60)
    assert "sampling_params.temperature = -1.0" in refusal
    assert caller.left.remote(run_time.PROMPT, greedy | {"max_tokens": 400}).result(timeout_s=60) > 0
    asyncio.run(_both_are_back(cluster.routers))
    serve.delete("someone")


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


async def _ask_until(over: asyncio.Event, address: str, others: Sequence[str], number: int) -> list[Answer]:
    """One client that begins at a router, and all that it is told."""
    answers: list[Answer] = []
    async with AsyncClient([address, *others], draw=lambda: 0.0) as client:
        while not over.is_set():
            answers.append(await ask(client, long_wish(number)))
    return answers


async def _lose_a_router(
    addresses: Sequence[str], routers: list[psutil.Process], strike: Callable[[list[psutil.Process]], None]
) -> list[list[Answer]]:
    """The answers to eight clients at two routers, before, while and after one of these goes."""
    over = asyncio.Event()
    clients = [asyncio.create_task(_ask_until(over, addresses[number % 2], addresses, number)) for number in range(8)]

    async def one_is_gone() -> bool:
        return not all(router.is_running() for router in routers)

    async with AsyncClient(addresses[0]) as first, AsyncClient(addresses[1]) as second:
        for client in (first, second):
            await until(lambda client=client: _has(client, num_open=4), 10.0)
    struck_s = time.monotonic()
    strike(routers)
    await until(one_is_gone, GONE_S)
    print(f"the router was gone after {time.monotonic() - struck_s:.2f} s")
    over.set()
    return await asyncio.gather(*clients)


async def _has(client: AsyncClient, num_open: int, num_replicas: int = 2) -> bool:
    """Whether the client's router has so many requests and replicas. False where there is no router."""
    try:
        load = await client.get_load()
    except ReplicaError:
        return False
    return (load.num_open, len(load.replicas)) == (num_open, num_replicas)


async def _both_are_back(addresses: Sequence[str]) -> None:
    for address in addresses:
        async with AsyncClient(address) as client:
            await until(lambda client=client: _has(client, num_open=0), 30.0)


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
    told = asyncio.run(_lose_a_router(cluster.routers, routers, strike))
    for answers, wanted in zip(told, expected([long_wish(number) for number in range(8)]), strict=True):
        for answer in answers:
            assert answer.error is None
            assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
    pauses_s = [answer.longest_pause_s for answers in told for answer in answers]
    print(f"the longest pause within one of {len(pauses_s)} streams was {max(pauses_s):.2f} s")
    set_num_routers(2)
    asyncio.run(_both_are_back(cluster.routers))


async def _lose_the_directory(address: str, victim: psutil.Process) -> list[list[Answer]]:
    async with AsyncClient(address) as client:

        async def ask_eight() -> list[Answer]:
            return await asyncio.gather(*(ask(client, long_wish(number)) for number in range(8)))

        async def is_replaced() -> bool:
            return any(process != victim for process in processes_named(":Directory"))

        victim.kill()
        without = await ask_eight()
        await until(is_replaced, 60.0)
        await asyncio.sleep(2 * SETTLED_S)  # a directory that forgot replicas would have taken them away by now
        assert (await client.list_models()).models[0].num_replicas == 2
        return [without, await ask_eight()]


@pytest.mark.slow  # without Ray, test_membership.py does it every time
def test_a_killed_directory_is_replaced_and_nobody_notices(
    cluster: Serving, expected: Callable[[list[Wish]], list[Answer]]
):
    (victim,) = processes_named(":Directory")
    right = [answer.token_ids for answer in expected([long_wish(number) for number in range(8)])]
    for answers in asyncio.run(_lose_the_directory(cluster.routers[0], victim)):
        assert [answer.token_ids for answer in answers] == right


def test_what_ray_keeps_of_a_cluster_has_no_token_and_no_prompt(cluster: Serving):
    import ray

    prompt = "a-most-private-question-about-the-okapi"

    async def ask() -> None:
        async with AsyncClient(cluster.routers) as client:
            await client.generate(prompt, SamplingParams(max_tokens=4))
            with pytest.raises(HoldfastError):
                await client.generate(prompt, SamplingParams(max_tokens=4), model=prompt)

    asyncio.run(ask())
    token = models.directory_of("holdfast").security.remote().result(timeout_s=10).token
    assert len(token) >= 43
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        for secret in (token, prompt):
            assert secret.encode() not in content, path
    for process in ray_processes():
        with contextlib.suppress(psutil.Error):
            said = " ".join([*process.cmdline(), *process.environ().values()])
            assert token not in said, process
