"""The OpenAPI description is true: what it allows is answered as it says, and what it forbids is refused."""

import importlib

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from holdfast.router.api.http.openapi import description
from holdfast.router.api.http.page_files import PAGE
from holdfast.router.config import LimitsConfig
from tests.loops import on_a_loop
from tests.router.api.http.served import served
from tests.router.api.http.test_openai_sdk import openai_site


@on_a_loop
async def test_every_route_is_described_and_no_other():
    async with openai_site() as (place, _), httpx2.AsyncClient(verify=False) as client:
        message = (await client.get(f"http://{place.router.http_address}/openapi.json")).json()
        routes = {route.path.replace(":path", "") for route in place.router._http_api.app().routes}
    assert message["paths"].keys() == routes - {"/openapi.json", *PAGE}


def test_declared_parameters_are_part_of_the_bodies():
    schemas = description()["components"]["schemas"]
    temperature, _null = schemas["ChatBody"]["properties"]["temperature"]["anyOf"]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 100)
    assert "temperature" not in schemas["TokenizeBody"]["properties"]


def is_timeout(answer) -> bool:
    return answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"


def check_all(max_examples: int, *, stores: bool) -> None:
    schemathesis = importlib.import_module("schemathesis")
    from schemathesis.checks import CHECKS, not_a_server_error
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    # What one field says of another, and of the model, no schema says: such bodies are refused though they fit.
    left_out = [positive_data_acceptance]
    CHECKS.get_all()
    schema = schemathesis.openapi.from_dict(description())
    with served(limits=LimitsConfig(max_message_bytes=2**20), stores=stores) as router:
        for found in schema.get_all_operations():
            operation = found.ok()
            strategy = st.one_of(
                operation.as_strategy(), operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
            )

            @given(case=strategy)
            @settings(
                max_examples=max_examples,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            def answered_as_described(case):
                answer = case.call(base_url=f"http://{router.address}", timeout=20)
                # A body may ask for less time than the answer takes, and 504 says that its time is up.
                excluded = [*left_out, not_a_server_error] if is_timeout(answer) else left_out
                case.validate_response(answer, excluded_checks=excluded)

            answered_as_described()


def test_schemathesis_finds_nothing():
    check_all(max_examples=2, stores=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schemathesis_finds_nothing_in_a_long_search():
    check_all(max_examples=150, stores=False)
