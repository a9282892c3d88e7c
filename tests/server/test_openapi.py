"""What /openapi.json says is so: schemathesis makes requests by it, right and wrong ones, and checks every answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from server_world import Live, serving

from anaphora.server.tenants import ApiKeys, Caller

KEY = "key-root"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.allow_header_conformance,
    checks.unsupported_method,
    checks.ignored_auth,
]


@pytest.fixture(scope="module")
def keyed(make_engine: Any) -> Iterator[Live]:
    """A small context bounds what one request may generate."""
    keys = ApiKeys([(KEY, Caller("ops", is_admin=True)), ("key-a", Caller("anna", is_admin=False))])
    with serving(make_engine(max_model_len=48, num_blocks=64), api_keys=keys) as live:
        yield live


@pytest.fixture(scope="module")
def document(keyed: Live) -> Any:
    return keyed.client.get("/openapi.json", headers=AUTHORIZED).json()


@pytest.fixture(scope="module")
def description(keyed: Live, document: Any) -> Any:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=keyed.url)
    return schema


def test_everything_that_is_routed_is_described(keyed: Live, document: Any) -> None:
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    routed = {(method, route.path_format) for route in keyed.app.routes for method in route.methods - {"HEAD"}}
    assert described == routed


def test_every_field_of_a_body_has_a_shape(document: Any) -> None:
    schemas = document["components"]["schemas"]
    fields = {(name, field): shape for name, one in schemas.items() for field, shape in one["properties"].items()}
    assert [key for key, shape in fields.items() if not {"type", "anyOf", "enum", "$ref"} & shape.keys()] == []


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_one_that_is_described(keyed: Live, description: Any, mode: GenerationMode) -> None:
    for result in description.get_all_operations():
        operation = result.ok()
        if operation.method == "get" and mode is GenerationMode.NEGATIVE:
            continue  # nothing that could be wrong

        @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.call_and_validate(headers=AUTHORIZED, checks=CHECKS)

        ask()
        assert keyed.engine.num_unfinished == 0, operation.path
