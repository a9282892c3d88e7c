"""Adapters over HTTP: loaded, named, replaced and unloaded while the server runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lora_world import ATTENTION, write_adapter
from server_world import Live, cached, chunks, serving
from tiny_llama import ids

from anaphora.cli.main import main
from anaphora.engine.async_engine import AsyncEngine
from anaphora.engine.request_group import NewRequest
from anaphora.errors import EngineStoppedError
from anaphora.sampling_params import SamplingParams
from anaphora.server.tenants import ApiKeys, Caller

PROMPT = ids(2200, 69)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folders(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, tiny, seed, targets=ATTENTION, strength=0.2)
        for seed, name in enumerate(["one", "two"], start=41)
    }


@pytest.fixture
def live_lora(make_engine: Any) -> Iterator[Live]:
    with serving(make_engine(max_loras=2)) as running:
        yield running


def load(live: Live, name: str, folder: Path, status: int = 200, **body: Any) -> Any:
    return live.post(LOAD, status, lora_name=name, lora_path=str(folder), **body)


def models(live: Live) -> dict[str, Any]:
    return {model["id"]: model for model in live.client.get("/v1/models").json()["data"]}


def text(reply: dict[str, Any]) -> str:
    return reply["choices"][0]["text"]


def test_model_names_an_adapter_on_every_endpoint(live_lora: Live, folders: dict[str, Path]) -> None:
    live = live_lora
    loaded = load(live, "one", folders["one"])
    assert loaded.keys() == {"lora_name", "identity", "rank", "num_bytes"}
    assert (loaded["lora_name"], loaded["rank"], len(loaded["identity"])) == ("one", 4, 71)
    assert models(live)["one"] == models(live)["tiny"] | {"id": "one", "parent": "tiny"}
    assert "parent" not in models(live)["tiny"]

    base, adapted = live.generate(PROMPT), live.generate(PROMPT, model="one")
    assert text(base) != text(adapted)  # else nothing below is shown
    assert [reply["model"] for reply in (base, adapted)] == ["tiny", "one"]
    assert [cached(reply) for reply in (base, adapted)] == [0, 0]
    assert [cached(live.generate(PROMPT, model=name)) for name in ("tiny", "one")] == [64, 64]
    events = chunks(live, prompt=PROMPT, max_tokens=8, temperature=0, model="one")
    assert "".join(event["choices"][0]["text"] for event in events) == text(adapted)
    assert {event["model"] for event in events} == {"one"}

    messages = [{"role": "user", "content": "x" * 60}]
    chat = [
        live.post("/v1/chat/completions", messages=messages, max_tokens=8, temperature=0, model=name)
        for name in ("tiny", "one")
    ]
    assert chat[0]["choices"][0]["message"] != chat[1]["choices"][0]["message"]
    assert [reply["model"] for reply in chat] == ["tiny", "one"]
    responses = [
        live.post("/v1/responses", input="x" * 60, max_output_tokens=8, temperature=0, model=name)
        for name in ("tiny", "one")
    ]
    assert [reply["usage"]["input_tokens_details"]["cached_tokens"] for reply in responses] == [64, 64]
    for reply, other in zip(responses, chat, strict=True):
        assert reply["output"][0]["content"][0]["text"] == other["choices"][0]["message"]["content"]
    embedded = [live.post("/v1/embeddings", input="x" * 60, model=name) for name in ("tiny", "one")]
    assert embedded[0]["data"] != embedded[1]["data"]
    assert [reply["model"] for reply in embedded] == ["tiny", "one"]
    assert live.post("/tokenize", prompt="a", model="one")["tokens"] == live.post("/tokenize", prompt="a")["tokens"]


def test_replaced_and_unloaded_while_it_runs(live_lora: Live, folders: dict[str, Path]) -> None:
    live = live_lora
    load(live, "x", folders["one"])
    load(live, "y", folders["two"])
    old, new = text(live.generate(PROMPT, 200, model="x")), text(live.generate(PROMPT, 200, model="y"))
    assert old != new
    replies: list[Any] = []
    running = threading.Thread(target=lambda: replies.append(live.generate(PROMPT, 200, model="x")))
    running.start()
    while live.metrics()["num_requests_running"] < 1:
        assert running.is_alive()
    load(live, "x", folders["two"], load_inplace=True)
    assert running.is_alive()  # it was replaced under a request that runs
    replaced = live.generate(PROMPT, 200, model="x")
    running.join()
    assert text(replies[0]) == old
    assert text(replaced) == new and cached(replaced) > 0  # what y had computed: the same content
    unloaded = live.post(UNLOAD, lora_name="x", lora_int_id=3)
    assert unloaded == {"lora_name": "x", "identity": load(live, "z", folders["two"])["identity"]}
    refused = live.post("/v1/completions", 404, prompt=PROMPT, model="x")["error"]
    assert (refused["param"], refused["code"]) == ("model", "model_not_found")
    assert models(live).keys() == {"tiny", "y", "z"}


@pytest.mark.parametrize(
    ("path", "body", "param", "code", "status"),
    [
        (LOAD, {"lora_name": "a", "lora_path": "/nowhere"}, "lora_path", "invalid_adapter", 400),
        (LOAD, {"lora_name": "tiny", "lora_path": "{one}"}, "lora_name", "invalid_value", 400),
        (LOAD, {"lora_name": "", "lora_path": "{one}"}, "lora_name", "invalid_value", 400),
        (LOAD, {"lora_name": "a\n", "lora_path": "{one}"}, "lora_name", "invalid_value", 400),
        (LOAD, {"lora_name": "a", "lora_path": ""}, "lora_path", "invalid_adapter", 400),
        (LOAD, {"lora_name": "a", "lora_path": "a\0"}, "lora_path", "invalid_adapter", 400),
        (LOAD, {"lora_name": "a"}, "lora_path", "invalid_type", 400),
        (LOAD, {"lora_name": 1, "lora_path": "{one}"}, "lora_name", "invalid_type", 400),
        (LOAD, {"lora_name": "a", "lora_path": "{one}", "load_inplace": 1}, "load_inplace", "invalid_type", 400),
        (LOAD, {"lora_name": "a", "lora_path": "{one}", "more": 1}, "more", "unknown_parameter", 400),
        (UNLOAD, {"lora_name": "a"}, "lora_name", "adapter_not_found", 404),
        (UNLOAD, {"lora_name": "tiny"}, "lora_name", "adapter_not_found", 404),
        (UNLOAD, {}, "lora_name", "invalid_type", 400),
    ],
)
def test_what_is_refused(
    live: Live, folders: dict[str, Path], path: str, body: dict[str, Any], param: str, code: str, status: int
) -> None:
    values = {name: str(folders["one"]) if value == "{one}" else value for name, value in body.items()}
    error = live.post(path, status, **values)["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert models(live).keys() == {"tiny"}


def test_a_name_is_replaced_only_if_asked(live_lora: Live, folders: dict[str, Path]) -> None:
    load(live_lora, "a", folders["one"])
    error = load(live_lora, "a", folders["two"], 400)["error"]
    assert (error["param"], error["code"]) == ("lora_name", "adapter_exists")
    load(live_lora, "a", folders["two"], load_inplace=True)


def test_no_room_and_changed_files_are_told(
    make_engine: Any, tiny: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    mine = write_adapter(tmp_path / "mine", tiny, 43)
    with serving(make_engine(max_loras=1)) as live:
        load(live, "mine", mine)
        load(live, "one", folders["one"])
        running = threading.Thread(target=lambda: live.generate(PROMPT, 300, model="one"))
        running.start()
        while live.metrics()["num_requests_running"] < 1:
            assert running.is_alive()
        reply = live.client.post("/v1/completions", json={"prompt": PROMPT, "model": "mine"})
        assert running.is_alive()
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "adapters_in_use")
        assert reply.headers["retry-after"] == "1"
        running.join()
        write_adapter(mine, tiny, 44)
        error = live.post("/v1/completions", 503, prompt=PROMPT, model="mine")["error"]
        assert (error["param"], error["code"]) == ("model", "adapter_changed")
        assert str(tmp_path) not in str(error)  # who calls is not told where files lie
        assert live.generate(PROMPT, model="one")["model"] == "one"
        assert live.live_blocks() == 0


def test_an_adapter_that_left_memory_is_read_once_while_others_are_served(
    make_engine: Any, folders: dict[str, Path]
) -> None:
    """Six ask for it at once; until the disk has answered, who needs no adapter gets its reply."""
    engine = make_engine(max_loras=1)
    reading, disk, num_reads = threading.Event(), threading.Event(), []
    read = engine.reread_adapter

    def slow(info: Any) -> Any:
        num_reads.append(info.name)
        reading.set()
        assert disk.wait(30)
        return read(info)

    engine.reread_adapter = slow
    with serving(engine) as live, ThreadPoolExecutor(6) as pool:
        load(live, "one", folders["one"])
        expected = text(live.generate(PROMPT, model="one"))
        load(live, "two", folders["two"])  # one goes
        waiting = [pool.submit(live.generate, PROMPT, model="one") for _ in range(6)]
        assert reading.wait(30)
        assert live.generate(PROMPT)["usage"]["completion_tokens"] == 8
        assert not any(reply.done() for reply in waiting)
        disk.set()
        assert {text(reply.result()) for reply in waiting} == {expected}
        assert num_reads == ["one"]
        assert live.live_blocks() == 0


def test_who_leaves_while_its_adapter_is_read_leaves_nothing(make_engine: Any, folders: dict[str, Path]) -> None:
    engine = make_engine(max_loras=1)
    for name in folders:
        engine.load_adapter(name, folders[name])
    disk, read = threading.Event(), engine.reread_adapter
    engine.reread_adapter = lambda info: disk.wait(30) and read(info)

    async def main() -> None:
        service = AsyncEngine(engine)
        service.start()
        try:
            group = service.submit([NewRequest(PROMPT, SamplingParams(max_tokens=300), adapter="one")])
            await asyncio.sleep(0.05)
            group.close()
            disk.set()
            with pytest.raises(EngineStoppedError, match="closed"):
                await group.accepted()
            other = service.submit([NewRequest(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), adapter="one")])
            await other.accepted()
            while await other.receive():
                pass
            assert (service.stats.counters.num_finished_requests, service.num_unfinished) == (1, 0)
        finally:
            await service.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_error_names_its_field_whatever_is_in_it(live_lora: Live, folders: dict[str, Path]) -> None:
    """A name may hold the word folder, and a path the word name."""
    for name in ("a\n", "folder\n"):
        assert load(live_lora, name, folders["one"], 400)["error"]["param"] == "lora_name"
    for path in ("name\0", "/no/name"):
        assert load(live_lora, "folder", Path(path), 400)["error"]["param"] == "lora_path"


def test_only_an_admin_loads_and_everybody_uses(make_engine: Any, folders: dict[str, Path]) -> None:
    keys = ApiKeys([("k", Caller("anna", False)), ("root", Caller("ops", True))])
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("k", "root"))
    body = {"lora_name": "one", "lora_path": str(folders["one"])}
    with serving(make_engine(), api_keys=keys) as live:
        for headers, status in ((None, 401), (user, 403), (admin, 200)):
            assert live.client.post(LOAD, json=body, headers=headers).status_code == status
        assert (
            live.client.post("/v1/completions", json={"prompt": [8], "model": "one"}, headers=user).status_code == 200
        )
        for headers, status in ((None, 401), (user, 403), (admin, 200)):
            assert live.client.post(UNLOAD, json={"lora_name": "one"}, headers=headers).status_code == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "a"], "NAME=FOLDER"),
        (["--lora", "=x"], "NAME=FOLDER"),
        (["--lora", "a=x", "--lora", "a=y"], "twice"),
        (["--lora", "m=x", "--served-model-name", "m"], "name of the model"),
    ],
)
def test_a_wrong_lora_option_is_told_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["serve", "no-such-model", "--port", "0", *options]) == 2
    assert message in capsys.readouterr().err
