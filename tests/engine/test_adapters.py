"""Names of adapters, what they stand for, and which adapters are in memory: without a tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import make_engine

from anaphora.core.hashing import ExtraKeyKind
from anaphora.engine.adapters import AdapterRegistry
from anaphora.engine.holdings import Holdings
from anaphora.errors import (
    AdapterChangedError,
    AdapterFileError,
    AdapterLimitError,
    ConfigError,
    DuplicateAdapterError,
    InvalidParameterError,
    UnknownAdapterError,
)
from anaphora.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=3, temperature=0.0)


@dataclass(frozen=True)
class FakeAdapter:
    digest: str
    rank: int = 4
    num_bytes: int = 10


class World:
    """Folders with a content each, and an executor that notes what it holds."""

    def __init__(self, max_loras: int = 2, **contents: str) -> None:
        self.contents = contents  # by the last part of a folder's path
        self.held: set[str] = set()
        self.num_reads = 0
        self.registry = AdapterRegistry(self.read, self, max_loras=max_loras)

    def read(self, folder: str) -> FakeAdapter:
        self.num_reads += 1
        content = self.contents.get(os.path.basename(folder))
        if content is None:
            raise AdapterFileError(f"secret place {folder}")
        return FakeAdapter(content.encode().hex())

    def add_adapter(self, adapter: Any) -> None:
        assert adapter.digest not in self.held
        self.held.add(adapter.digest)

    def remove_adapter(self, digest: str) -> None:
        self.held.remove(digest)

    def load(self, name: str, folder: str, replace: bool = False) -> None:
        self.registry.load(name, folder, self.registry.read(folder), replace=replace)

    def acquire(self, name: str) -> str:
        with self.registry.acquired(name) as digest:
            return digest

    @property
    def in_memory(self) -> str:
        """The contents that are held, in order."""
        assert self.held == self.registry._num_users.keys()
        return "".join(sorted(bytes.fromhex(digest).decode() for digest in self.held))


def test_the_least_recently_used_adapter_leaves_first_and_comes_back_on_use() -> None:
    world = World(a="A", b="B", c="C")
    for name in "abc":
        world.load(name, name)
    assert world.in_memory == "BC"
    world.registry.release(world.acquire("b"))
    assert world.num_reads == 3
    world.registry.release(world.acquire("a"))  # in the place of c
    assert (world.in_memory, world.num_reads) == ("AB", 4)
    assert [info.name for info in world.registry.infos] == ["a", "b", "c"]


def test_what_is_in_use_stays_and_a_load_beside_it_is_not_lost() -> None:
    world = World(max_loras=1, a="A", b="B")
    world.load("a", "a")
    digest = world.acquire("a")
    world.load("b", "b")
    assert world.in_memory == "A"
    num_reads = world.num_reads
    with pytest.raises(AdapterLimitError):
        world.acquire("b")
    assert world.num_reads == num_reads  # no room: the disk is not asked
    world.registry.release(digest)
    world.registry.release(world.acquire("b"))
    assert world.in_memory == "B"


def test_a_content_leaves_with_its_last_name_and_its_last_request() -> None:
    world = World(a="A", same="A", b="B")
    world.load("a", "a")
    world.load("also a", "same")
    digest = world.acquire("a")
    world.registry.unload("a")
    assert world.acquire("also a") == digest
    world.registry.unload("also a")
    assert world.in_memory == "A"
    world.registry.release(digest)
    assert world.in_memory == "A"
    world.registry.release(digest)
    assert world.in_memory == ""
    with pytest.raises(UnknownAdapterError):
        world.acquire("a")


def test_a_replacement_lets_the_old_content_go_when_nobody_uses_it() -> None:
    world = World(a="A", b="B")
    world.load("x", "a")
    with pytest.raises(DuplicateAdapterError):
        world.load("x", "b")
    world.load("x", "b", replace=True)
    assert world.in_memory == "B"
    old = world.acquire("x")
    world.load("x", "a", replace=True)
    assert world.in_memory == "AB"
    assert world.acquire("x") != old
    world.registry.release(old)
    assert world.in_memory == "A"


def test_a_content_that_comes_back_while_its_last_request_runs_is_the_same_one() -> None:
    world = World(a="A")
    world.load("x", "a")
    digest = world.acquire("x")
    world.registry.unload("x")
    world.load("y", "a")  # held already: a second one would trip the executor
    world.registry.release(digest)
    assert world.in_memory == "A"


@pytest.mark.parametrize("now", ["other", None])
def test_files_that_changed_while_out_of_memory_are_never_taken_for_the_old_ones(now: str | None) -> None:
    world = World(max_loras=1, a="A", b="B")
    world.load("a", "a")
    world.load("b", "b")
    world.contents["a"] = now  # type: ignore[assignment]
    with pytest.raises(AdapterChangedError, match="'a'") as error:
        world.acquire("a")
    assert "secret" not in str(error.value)
    assert world.in_memory in ("", "B")
    world.registry.release(world.acquire("b"))


def test_a_request_that_is_refused_lets_go() -> None:
    world = World(a="A")
    world.load("a", "a")
    with pytest.raises(KeyError), world.registry.acquired("a"):
        raise KeyError
    world.registry.unload("a")
    assert world.in_memory == ""


@pytest.mark.parametrize("name", ["", "x" * 257, "a\n", "\ud800", None, 3, b"a"])
def test_a_name_must_be_printable(name: Any) -> None:
    world = World(a="A")
    with pytest.raises(InvalidParameterError, match="name"):
        world.load(name, "a")
    assert world.registry.infos == () and world.in_memory == ""


@pytest.mark.parametrize("folder", ["", "a\0", None, 3, b"a"])
def test_a_folder_must_be_a_path(folder: Any) -> None:
    with pytest.raises(AdapterFileError, match="folder"):
        World(a="A").registry.read(folder)


def test_a_folder_is_told_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a="A")
    monkeypatch.chdir(tmp_path)
    world.load("a", "a")
    assert world.registry.infos[0].folder == str(tmp_path / "a")


def test_there_is_room_for_one_at_least() -> None:
    with pytest.raises(ConfigError):
        World(max_loras=0)


# -- in the engine -----------------------------------------------------------------------------------------------------


def make_engine_with(world: World) -> Any:
    engine, executor, _ = make_engine(max_num_batched_tokens=8)
    engine._holdings = Holdings(world.registry, executor)
    return engine, executor


def test_the_plan_and_the_key_hold_the_digest() -> None:
    world = World(a="A")
    engine, executor = make_engine_with(world)
    engine.load_adapter("x", "a")
    engine.add_request("1", [1, 2, 3], PARAMS, adapter="x", cache_salt="s")
    engine.add_request("2", [1, 2, 3], PARAMS)
    keys = [request.extra_keys for request in (engine._live[name].request for name in "12")]
    assert [(key.kind, key.payload, key.block_index) for key in keys[0]] == [
        (ExtraKeyKind.SALT, b"s", 0),
        (ExtraKeyKind.LORA, b"A", 0),
    ]
    assert keys[1] == ()
    engine.step()
    assert [admission.adapter for admission in executor.plans[0].admitted] == [b"A".hex(), None]


def test_a_request_holds_its_adapter_until_it_ends_however_it_ends() -> None:
    world = World(max_loras=3, a="A", b="B", c="C")
    engine, executor = make_engine_with(world)
    for name in "abc":
        engine.load_adapter(name, name)
        engine.add_request(name, [1, 2, 3], PARAMS, adapter=name)
        engine.unload_adapter(name)
    assert world.in_memory == "ABC"
    engine.abort("a")
    assert world.in_memory == "BC"
    executor.failed = {"b"}
    engine.step()
    assert world.in_memory == "C"
    while engine.has_unfinished:
        assert world.in_memory == "C"
        engine.step()
    assert world.in_memory == ""


def test_a_step_that_raises_lets_go_of_its_adapters() -> None:
    world = World(a="A")
    engine, executor = make_engine_with(world)

    def fail(plan: Any) -> None:
        raise KeyboardInterrupt

    executor.before = fail
    engine.load_adapter("a", "a")
    engine.add_request("1", [1, 2, 3], PARAMS, adapter="a")
    engine.unload_adapter("a")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert world.in_memory == ""
    engine.abort("1")


def test_an_engine_without_adapters_says_so() -> None:
    engine, _, _ = make_engine()
    assert engine.adapters == ()
    with pytest.raises(InvalidParameterError, match="LoRA"):
        engine.load_adapter("a", "a")
    with pytest.raises(InvalidParameterError, match="LoRA"):
        engine.add_request("1", [1], PARAMS, adapter="a")
    assert not engine.has_unfinished
