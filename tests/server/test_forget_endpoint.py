"""What callers forget is found no more: their own, or anything for an admin; and nothing else is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server_world import Live, cached, serving
from tiny_llama import ids

from anaphora.server.config import ServerConfig
from anaphora.server.tenants import load_api_keys

PROMPT = ids(2200, 69)
KEYS = "key-a anna\nkey-a2 anna\nkey-b berta\nkey-c carla\nkey-root ops admin\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(make_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(KEYS)
    config = ServerConfig(share_cache=(frozenset({"berta", "carla"}),))
    with serving(make_engine(), config, api_keys=load_api_keys(path), secret=b"s" * 32) as live:
        yield live


def forget(live: Live, key: str | None = None, status: int = 200, **body: Any) -> Any:
    return live.post("/forget_prefix_cache", status, None if key is None else bearer(key), **body)


def hit_as(live: Live, key: str, **body: Any) -> int:
    values = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    return cached(live.post("/v1/completions", headers=bearer(key), **(values | body)))


def warm(live: Live) -> None:
    assert live.post("/reset_prefix_cache", headers=bearer("key-root")) == {"reset": True}
    for key in ("key-a", "key-b", "key-root"):
        for salt in (None, "x"):
            assert hit_as(live, key, cache_salt=salt) == 0


def hits(live: Live) -> list[int]:
    """Of anna, berta and the admin, without a salt and with `x`."""
    return [hit_as(live, key, cache_salt=salt) for key in ("key-a", "key-b", "key-root") for salt in (None, "x")]


def test_a_salt_a_prompt_and_nothing_else_without_tenants(live: Live) -> None:
    live.reset()
    for salt in (None, "x", "y"):
        live.hit(PROMPT, cache_salt=salt)
    assert forget(live, cache_salt="x") == {"forgotten": "cache_salt"}
    assert [live.hit(PROMPT, cache_salt=salt) for salt in (None, "x", "y", "x")] == [64, 0, 64, 64]
    assert forget(live, prompt=PROMPT[:40]) == {"forgotten": "prompt", "num_tokens": 32}
    assert [live.hit(PROMPT, cache_salt=salt) for salt in (None, "x", "y", None)] == [16, 64, 64, 64]
    assert forget(live, prompt=PROMPT[:40], cache_salt="y")["num_tokens"] == 32
    assert [live.hit(PROMPT, cache_salt=salt) for salt in (None, "x", "y")] == [64, 64, 16]


def test_a_prompt_in_text_is_the_one_that_completions_take(live: Live) -> None:
    live.reset()
    text = "once upon a time there was a cache that forgot"
    live.hit(text)
    assert live.hit(text) == 32
    assert forget(live, prompt=text[:20], add_special_tokens=True)["num_tokens"] == 16
    assert live.hit(text) == 0


def test_a_tenant_forgets_all_that_is_its_own(keyed: Live) -> None:
    warm(keyed)
    assert forget(keyed, "key-a2", tenant="anna") == {"forgotten": "tenant"}
    assert hits(keyed) == [0, 0, 64, 64, 64, 64]
    assert hits(keyed) == [64] * 6


def test_a_tenants_salt_and_prompt_are_its_own_alone(keyed: Live) -> None:
    warm(keyed)
    forget(keyed, "key-a", cache_salt="x")
    assert hits(keyed) == [64, 0, 64, 64, 64, 64]
    forget(keyed, "key-a", prompt=PROMPT[:32])
    assert hits(keyed) == [16, 64, 64, 64, 64, 64]
    forget(keyed, "key-a", prompt=PROMPT[:32], cache_salt="x")
    assert hits(keyed) == [64, 16, 64, 64, 64, 64]


def test_an_admin_forgets_for_others_and_for_those_who_share_with_them(keyed: Live) -> None:
    warm(keyed)
    forget(keyed, "key-root", tenant="berta", cache_salt="x")
    assert hits(keyed) == [64, 64, 64, 0, 64, 64]
    forget(keyed, "key-root", tenant="anna", prompt=PROMPT[:32])
    assert hits(keyed) == [16, 64, 64, 64, 64, 64]
    forget(keyed, "key-root", tenant="carla")
    assert hits(keyed) == [64, 64, 0, 0, 64, 64]


@pytest.mark.parametrize(
    ("key", "status", "body"),
    [
        ("key-a", 403, {"tenant": "berta"}),
        ("key-a", 403, {"tenant": "nobody"}),
        ("key-a", 403, {"tenant": "berta", "cache_salt": "x"}),
        ("key-a", 403, {"adapter": "ab" * 32}),
        ("key-root", 400, {"tenant": "nobody"}),
        ("key-root", 404, {"adapter": "none"}),
        ("key-root", 400, {"adapter": "none", "tenant": "anna"}),
        ("key-root", 400, {"adapter": "none", "cache_salt": "x"}),
        ("key-a", 400, {}),
        ("key-a", 400, {"cache_salt": ""}),
        ("key-a", 400, {"cache_salt": [{"start": 4, "salt": "x"}]}),
        ("key-a", 400, {"prompt": []}),
        ("key-a", 400, {"prompt": PROMPT[:15]}),
        ("key-a", 400, {"prompt": [True] * 16}),
        ("key-a", 400, {"prompt": [5000] * 16}),
        ("key-a", 400, {"prompt": 7}),
        ("key-a", 400, {"prompt": PROMPT, "add_special_tokens": True}),
        ("key-a", 400, {"add_special_tokens": True, "cache_salt": "x"}),
        ("key-a", 404, {"prompt": PROMPT, "model": "none"}),
        ("key-a", 400, {"everything": True}),
        ("nobody", 401, {"tenant": "anna"}),
    ],
)
def test_what_may_not_or_cannot_be_forgotten_is_refused_and_stays(
    keyed: Live, key: str, status: int, body: dict[str, Any]
) -> None:
    forget(keyed, "key-root", tenant="anna")
    for _ in range(2):
        hit_as(keyed, "key-a", cache_salt="x")
    forget(keyed, key, status, **body)
    assert hit_as(keyed, "key-a", cache_salt="x") == 64


def test_a_server_without_tenants_has_none_to_forget(live: Live) -> None:
    forget(live, status=400, tenant="anna")
    assert forget(live, adapter="ab" * 32) == {"forgotten": "adapter"}
