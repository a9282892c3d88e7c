"""One scenario, two ways in: Python and HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_subject import start_http
from subject import start


@pytest.fixture(params=["python", "http"])
def fresh(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """START for a scenario that runs both ways: options -> LLM, or a live server that answers as one."""
    if request.param == "python":
        yield start
        return
    with contextlib.ExitStack() as servers:
        yield lambda *args, **options: servers.enter_context(start_http(*args, **options))
