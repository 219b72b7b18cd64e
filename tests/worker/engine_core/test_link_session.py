"""The names of attempts: what goes in under a router's number comes out under it, and links do not meet."""

from dataclasses import replace

from holdfast.worker.engine_core.link_session import LinkSession
from tests.worker.schedulers import make_request


def test_a_request_of_a_link_is_known_by_its_attempt():
    session = LinkSession("link-3")
    request = session.named(make_request("what the router calls it"), 17)
    assert request.request_id == session.request_id(17) == "link-3/17"
    assert session.attempt(request.request_id) == 17


def test_equal_attempts_and_groups_of_two_links_are_not_the_same():
    request = replace(make_request("r"), group_id="g")
    ours, theirs = (LinkSession(f"link-{i}").named(request, 1) for i in (1, 11))
    assert ours.request_id != theirs.request_id
    assert ours.group_id != theirs.group_id


def test_a_request_without_a_group_is_in_none():
    assert LinkSession("link-1").named(make_request("r"), 1).group_id == ""
