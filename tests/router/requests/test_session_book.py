"""Sessions are found by their names or their prefixes, told with what was saved, and clients that waste their cache."""

from functools import partial

from holdfast.cluster.commands.status import RouterStatus, _router_lines
from holdfast.router.dispatch.timeline import Timeline
from holdfast.router.requests import session_book
from holdfast.router.requests.request_stats import EndedRequest, Phases
from holdfast.router.requests.session_book import SessionBook, saved_s
from holdfast.router.text.head_lines import HeadLine
from holdfast.v1 import inference_pb2
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_admin import client_of
from tests.router.site import site
from tests.router.text.sample_templates import HERMES

LOAD = partial(byte_tokenizer, chat_template=HERMES)


def ended(prompt, *, cached=0, disk=0, at=1.0, lines=(), model="m", first=0.5, **fields):
    request = EngineRequest(
        request_id="r", prompt_token_ids=tuple(prompt), sampling_params=SamplingParams(seed=1), **fields
    )
    timeline = Timeline(num_cached_tokens=cached, num_disk_tokens=disk)
    return EndedRequest(
        request=request,
        model=model,
        outcome="stop",
        num_output_tokens=1,
        began_s=0.0,
        first_token_s=first,
        ended_s=at,
        phases=Phases(),
        reader_wait_s=0.0,
        timeline=timeline,
        head_lines=lines,
    )


def test_a_turn_goes_on_from_the_longest_prompt_that_it_begins_with():
    book = SessionBook()
    for number in (1, 2):  # two sessions with one beginning
        turn = [*range(100), *[number] * 50]
        for cached in (0, 96, 144):
            book(ended(turn, cached=cached, disk=cached // 3))
            turn = [*turn, *range(60)]
    found = book.sessions()
    assert [(one.num_turns, one.num_prompt_tokens) for one in found] == [(3, 270), (3, 270)]
    for one in found:
        assert (one.num_disk_tokens, one.num_saved_tokens, one.num_computed_tokens) == (80, 240, 150 + 114 + 126)
        assert saved_s(one, {"m": 120.0}) == 2.0
        assert saved_s(one, {}) == 0.0


def test_no_session_has_turns_of_another_tenant_model_or_salt():
    book, prompt = SessionBook(), list(range(64))
    book(ended(prompt))
    for fields in ({"tenant": "b"}, {"model": "n"}, {"cache_salt": "s"}):
        book(ended([*prompt, 1], **fields))
    assert book.sessions() == []
    book(ended([*prompt, 1]))
    assert [one.num_turns for one in book.sessions()] == [2]


def test_a_name_is_enough_whatever_the_prompt_and_failed_requests_are_no_turns():
    book = SessionBook()
    book(ended([1], session_id="chat", cache_ttl_s=60))
    book(ended([2, 3], session_id="chat", tenant="other"))
    book(ended([4], session_id="chat", first=None))
    told = [(one.name, one.tenant, one.num_turns, one.kept_until_s) for one in book.sessions()]
    assert told == [("chat", "other", 1, 0.0), ("chat", "", 1, 61.0)]


def test_those_that_were_idle_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(session_book, "MAX_SESSIONS", 3)
    book, prompts = SessionBook(), [[number] * 40 for number in range(5)]
    for prompt in prompts:
        book(ended(prompt))
    for prompt in prompts:
        book(ended([*prompt, 9]))
    assert len(book.sessions()) <= 3
    assert sum(sum(lengths.values()) for lengths in book._lengths.values()) == len(book._sessions) == 3
    assert not any(one.num_turns > 2 for one in book.sessions())


def test_who_changes_a_line_with_each_call_is_told_of_with_what_that_cost():
    book = SessionBook()
    for day in (1, 1, 2, 3):
        book(ended(range(100), cached=20, tenant="alice", lines=[HeadLine("date", f"Today is {day}")]))
    book(ended(range(100), tenant="bob", lines=[HeadLine("date", "Today is 1")]))
    assert [(one.tenant, one.rule, one.num_requests, one.num_tokens) for one in book.spoiled()] == [
        ("alice", "date", 2, 160)
    ]


@on_a_loop
async def test_the_page_and_status_are_told_and_the_billing_line_is_gone():
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=LOAD, http=True) as place, client_of(place) as client:
        said = [{"role": "user", "content": "Begin."}]
        for number in range(3):
            system = f"x-anthropic-billing-header: cch={number};Be brief.\nToday is 2026-11-1{number}"
            body = {"messages": [{"role": "system", "content": system}, *said], "max_tokens": 2}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            named = {"messages": said, "max_tokens": 2, "prompt_cache_key": "mine"}
            assert (await client.post("/v1/chat/completions", json=named)).status_code == 200
        assert b"billing" not in bytes(replica.submits[0].prompt_token_ids)
        cluster = (await client.get("/cluster")).json()
        (session,) = cluster["sessions"]
        assert (session["name"], session["turns"], session["memory_tokens"]) == ("mine", 3, 0)
        (spoiled,) = cluster["spoiled"]
        assert (spoiled["rule"], spoiled["requests"]) == ("date", 2)
        load = await place.stub.GetLoad(inference_pb2.GetLoadRequest())
    lines = _router_lines(RouterStatus("here", load, inference_pb2.ListModelsResponse()))
    assert any("--head-line-rules ...,date moves it" in line for line, _ in lines)
