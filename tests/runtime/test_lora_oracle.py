"""Adapters in one packed batch: every output is what the model with that adapter merged into its weights gives."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_world import ATTENTION, MLP, TOLERANCE, deviation, is_exact, merged, write_adapter
from tiny_llama import ids, make_tiny_llama

from anaphora import LLM, SamplingParams
from anaphora.core import check_scheduler
from anaphora.errors import (
    AdapterChangedError,
    AdapterFileError,
    AdapterLimitError,
    DuplicateAdapterError,
    UnknownAdapterError,
)

PROMPT = ids(2200, 69)
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
APART = 100 * TOLERANCE
"""What the log-probabilities of two identities differ by at least, or a test of their isolation proves nothing."""


@pytest.fixture(scope="module")
def module() -> Any:
    return make_tiny_llama()


@pytest.fixture(scope="module")
def folders(module: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "attention": write_adapter(root / "attention", module, 1, targets=ATTENTION, alpha=12),
        "mlp": write_adapter(root / "mlp", module, 2, targets=MLP, rank=2, use_rslora=True, alpha=3),
        "all": write_adapter(
            root / "all",
            module,
            3,
            targets=ATTENTION + MLP,
            ranks={"q_proj": 8, "down_proj": 1},
            alpha_pattern={"q_proj": 4, "mlp.up_proj": 16},
        ),
        "one layer": write_adapter(root / "one", module, 4, targets=("v_proj", "o_proj"), layers=[2], alpha=60),
    }


@pytest.fixture(scope="module")
def references(module: Any, folders: dict[str, Path]) -> dict[str | None, Any]:
    """Adapter -> the model with it merged; None -> a copy of the model."""
    return {None: make_tiny_llama()} | {name: merged(module, folder) for name, folder in folders.items()}


def make_llm(module: Any, folders: dict[str, Path], **options: Any) -> LLM:
    llm = LLM(module, **({"num_blocks": 256, "dtype": "float32"} | options))
    for name, folder in folders.items():
        llm.load_adapter(name, folder)
    return llm


def ask(llm: LLM, adapter: str | None = None, prompt: list[int] = PROMPT, **options: Any) -> Any:
    (output,) = llm.generate([prompt], options.pop("params", PARAMS), adapter=adapter, **options)
    return output


def num_acquired(llm: LLM) -> int:
    return sum(llm.engine._holdings.adapters._num_users.values())


# -- exact per row -----------------------------------------------------------------------------------------------------


def run(llm: LLM, names: list[str | None], seed: int) -> list[tuple[str | None, Any]]:
    """24 requests that share four stems, each with an adapter or none, arriving over time."""
    engine, draw = llm.engine, random.Random(seed)
    stems = [ids(100 * seed + number, draw.randrange(1, 100)) for number in range(4)]
    todo, adapter_of, outputs = [], {}, []
    for number in range(24):
        prompt = draw.choice(stems) + ids(7000 + 100 * seed + number, draw.randrange(0, 20))
        adapter_of[f"r{number}"] = draw.choice(names)
        todo.append((f"r{number}", prompt or [8], draw.randrange(1, 16)))
    while todo or engine.has_unfinished:
        while todo and draw.random() < 0.8:
            request_id, prompt, max_tokens = todo.pop(0)
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2)
            engine.add_request(request_id, prompt, params, adapter=adapter_of[request_id])
        outputs += [step.output for step in engine.step() if step.output is not None]
        check_scheduler(engine._scheduler)
    return [(adapter_of[output.request_id], output) for output in outputs]


@pytest.mark.parametrize(
    ("budget", "caching", "num_blocks", "fast_forward"),
    [(15, True, 256, True), (33, False, 256, True), (512, True, 256, False), (64, True, 12, True)],
)
def test_every_output_is_that_of_its_own_adapter(
    module: Any,
    folders: dict[str, Path],
    references: dict[str | None, Any],
    budget: int,
    caching: bool,
    num_blocks: int,
    fast_forward: bool,
) -> None:
    llm = make_llm(
        module,
        folders,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        enable_prefix_caching=caching,
        fast_forward=fast_forward,
    )
    outputs = run(llm, list(references), seed=budget)
    assert len(outputs) == 24 and len({name for name, _ in outputs}) == 5
    for name, output in outputs:
        is_exact(references[name], output)
    counters = llm.stats().counters
    assert (counters.num_hit_tokens > 0) == caching
    assert (counters.num_preemptions > 0) == (num_blocks == 12)
    assert num_acquired(llm) == 0
    for layer in module.modules():
        assert "forward" not in vars(layer)  # and the module is as its owner left it


def test_identities_share_nothing_and_each_finds_its_own(
    module: Any, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    llm = make_llm(module, folders)
    names = list(references)
    cold = {name: ask(llm, name) for name in names}
    warm = {name: ask(llm, name) for name in names}
    assert [output.num_cached_tokens for output in cold.values()] == [0] * 5
    assert [output.num_cached_tokens for output in warm.values()] == [64] * 5
    for name in names:
        is_exact(references[name], cold[name])
        is_exact(references[name], warm[name])
    for one, other in itertools.permutations(names, 2):
        assert deviation(references[one], cold[other]) > APART


def test_salts_and_adapters_are_crossed(module: Any, folders: dict[str, Path]) -> None:
    llm = make_llm(module, folders)
    pairs = list(itertools.product((None, "mlp", "all"), (None, "mlp", "a")))  # a salt may be called like an adapter
    for expected in (0, 64):
        for name, salt in pairs:
            assert ask(llm, name, cache_salt=salt).num_cached_tokens == expected


def test_a_prompt_is_scored_with_its_adapter(
    module: Any, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    llm = make_llm(module, folders, max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    names = ["all", None]
    outputs = llm.generate([PROMPT, PROMPT], params, adapter=names)
    right = []
    for name in names:
        with torch.inference_mode():
            logits = references[name](input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
        scores = torch.log_softmax(logits[:-1].float(), dim=-1)
        right.append(torch.tensor([float(scores[i, token]) for i, token in enumerate(PROMPT[1:])]))
    for output, expected in zip(outputs, right, strict=True):
        given = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)]
        assert float((torch.tensor(given) - expected).abs().max()) < TOLERANCE
    assert float((right[0] - right[1]).abs().max()) > APART


@pytest.mark.parametrize("fast_forward", [True, False])
def test_an_engine_beside_it_on_the_same_module_is_not_touched(
    module: Any, folders: dict[str, Path], references: dict[str | None, Any], fast_forward: bool
) -> None:
    adapted, plain = (
        make_llm(module, folders, num_blocks=64, enable_prefix_caching=False, fast_forward=fast_forward)
        for _ in range(2)
    )
    with ThreadPoolExecutor(2) as threads:
        futures = [
            threads.submit(lambda llm, name: [ask(llm, name) for _ in range(6)], llm, name)
            for llm, name in ((adapted, "all"), (plain, None))
        ]
        outputs = [future.result(timeout=120) for future in futures]
    for name, given in zip(("all", None), outputs, strict=True):
        for output in given:
            is_exact(references[name], output)


def test_an_embedding_is_that_of_its_adapter(
    module: Any, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    llm = make_llm(module, folders)
    names = [None, "mlp", "all"]
    given = [torch.tensor(output.embedding) for output in llm.embed([PROMPT] * 3, normalize=False, adapter=names)]
    for name, own in zip(names, given, strict=True):
        with torch.inference_mode():
            states = references[name].model(input_ids=torch.tensor([PROMPT]), use_cache=False).last_hidden_state
        assert float((own - states[0, -1]).abs().max()) < TOLERANCE
        assert float((own - given[0]).abs().max()) > APART or name is None


def test_embeddings_share_what_is_cached_with_their_own_adapter_only(
    module: Any, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    llm = make_llm(module, folders)
    for name in (None, "mlp", "all"):
        given = [llm.embed([PROMPT], normalize=False, adapter=name)[0] for _ in range(2)]
        assert [output.num_cached_tokens for output in given] == [0, 64]
        with torch.inference_mode():
            states = references[name].model(input_ids=torch.tensor([PROMPT]), use_cache=False).last_hidden_state
        for output in given:
            assert float((torch.tensor(output.embedding) - states[0, -1]).abs().max()) < TOLERANCE
        output = ask(llm, name)  # and with generation under the same adapter
        assert output.num_cached_tokens == 64
        is_exact(references[name], output)


def test_choices_and_streams_take_an_adapter(
    module: Any, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    llm = make_llm(module, folders)
    *_, last = llm.stream(PROMPT, PARAMS, adapter="all")
    is_exact(references["all"], last.output)
    output = ask(llm, "all", params=SamplingParams(n=3, max_tokens=3, temperature=1.0, seed=1))
    assert len(output.outputs) == 3 and output.num_cached_tokens == 64
    assert num_acquired(llm) == 0


# -- replaced, by every path, while requests run -----------------------------------------------------------------------


def in_place(llm: LLM, folder: Path, other: Path) -> None:
    llm.load_adapter("x", other, replace=True)


def unload_and_load(llm: LLM, folder: Path, other: Path) -> None:
    llm.unload_adapter("x")
    llm.load_adapter("x", other)


def overwrite_and_replace(llm: LLM, folder: Path, other: Path) -> None:
    for file in other.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    llm.load_adapter("x", folder, replace=True)


def overwrite_unload_load(llm: LLM, folder: Path, other: Path) -> None:
    for file in other.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    llm.unload_adapter("x")
    llm.load_adapter("x", folder)


def by_way_of_another_name(llm: LLM, folder: Path, other: Path) -> None:
    llm.load_adapter("y", other)
    llm.load_adapter("x", other, replace=True)
    llm.unload_adapter("y")


@pytest.mark.parametrize("max_loras", [1, 4])
@pytest.mark.parametrize(
    "replace", [in_place, unload_and_load, overwrite_and_replace, overwrite_unload_load, by_way_of_another_name]
)
def test_a_replaced_adapter_is_never_hit_and_who_runs_ends_with_the_old_one(
    module: Any, references: dict[str | None, Any], tmp_path: Path, replace: Any, max_loras: int
) -> None:
    folder = write_adapter(tmp_path / "x", module, 11, targets=ATTENTION)
    other = write_adapter(tmp_path / "other", module, 12, targets=ATTENTION)
    old, new = merged(module, folder), merged(module, other)
    llm = LLM(module, num_blocks=256, dtype="float32", max_loras=max_loras, max_num_batched_tokens=32)
    llm.load_adapter("x", folder)
    base = ask(llm)
    before = ask(llm, "x")
    is_exact(old, before)
    assert deviation(new, before) > APART

    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    engine, ended = llm.engine, []
    engine.add_request("running", PROMPT + ids(5, 40), params, adapter="x")
    for _ in range(4):  # two chunks, and then token by token
        engine.step()
    engine.add_request("queued", PROMPT + ids(6, 9), params, adapter="x")  # it came before: it gets the old one
    replace(llm, folder, other)
    if max_loras == 1:
        with pytest.raises(AdapterLimitError):  # the old one is in use and takes the only place
            engine.add_request("refused", PROMPT, params, adapter="x")
    else:
        engine.add_request("new", PROMPT, params, adapter="x")  # beside the old ones, in the same steps
    engine.add_request("base", PROMPT, params)
    while engine.has_unfinished:
        ended += [step.output for step in engine.step() if step.output is not None]
    outputs = {output.request_id: output for output in ended}
    assert len(outputs) == (3 if max_loras == 1 else 4)
    for request_id, output in outputs.items():
        expected = {"new": new, "base": references[None]}.get(request_id, old)
        is_exact(expected, output)
    assert outputs["queued"].num_cached_tokens == 64  # of the old adapter
    assert outputs["base"].num_cached_tokens == 64  # the model itself keeps what it had
    if max_loras > 1:
        assert outputs["new"].num_cached_tokens == 0
    after = ask(llm, "x")
    is_exact(new, after)
    assert after.num_cached_tokens == (0 if max_loras == 1 else 64)
    assert ask(llm).num_cached_tokens == 64 and base.num_cached_tokens == 0
    assert num_acquired(llm) == 0 and len(engine._executor._adapters) == 1


def test_content_is_the_identity_whatever_it_is_called(module: Any, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", module, 11)
    write_adapter(tmp_path / "two", module, 11, base_model_name_or_path="elsewhere", lora_dropout=0.5)
    write_adapter(tmp_path / "regex", module, 11, target_modules=r".*\.(q|v)_proj")
    llm = LLM(module, num_blocks=64, dtype="float32")
    infos = [llm.load_adapter(name, tmp_path / name) for name in ("one", "two", "regex")]
    assert len({info.digest for info in infos}) == 1
    assert [ask(llm, name).num_cached_tokens for name in ("one", "two", "regex")] == [0, 64, 64]
    llm.unload_adapter("one")
    assert ask(llm, "two").num_cached_tokens == 64
    for name in ("two", "regex"):
        llm.unload_adapter(name)
    assert llm.engine._executor._adapters == {}
    assert llm.engine._executor._stacks._layers == ()  # nothing of it is left
    with pytest.raises(UnknownAdapterError):
        ask(llm, "one")
    llm.load_adapter("later", tmp_path / "one")
    assert ask(llm, "later").num_cached_tokens == 64  # nothing was forgotten, as nothing else could be meant


@pytest.mark.parametrize(
    "change", [{"alpha": 8.5}, {"seed": 12}, {"use_rslora": True}, {"targets": ("q_proj",)}, {"dtype": torch.bfloat16}]
)
def test_anything_that_changes_what_is_computed_is_another_identity(
    module: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    values = {"seed": 11, "alpha": 8.0}
    llm = LLM(module, num_blocks=64, dtype="float32")
    one = llm.load_adapter("one", write_adapter(tmp_path / "one", module, **values))
    other = llm.load_adapter("other", write_adapter(tmp_path / "other", module, **(values | change)))
    assert one.digest != other.digest
    outputs = [ask(llm, name) for name in ("one", "other")]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    is_exact(merged(module, tmp_path / "other"), outputs[1])
    assert deviation(merged(module, tmp_path / "one"), outputs[1]) > (1e-4 if "dtype" in change else TOLERANCE)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_left_memory_is_read_again_and_must_be_the_same(module: Any, tmp_path: Path) -> None:
    folders = {name: write_adapter(tmp_path / name, module, seed) for seed, name in enumerate("abc", start=21)}
    references = {name: merged(module, folder) for name, folder in folders.items()}
    llm = make_llm(module, folders, max_loras=2)
    digests = {info.name: info.digest for info in llm.engine.adapters}
    in_memory = llm.engine._executor._adapters
    assert in_memory.keys() == {digests["b"], digests["c"]}
    assert ask(llm, "b").num_cached_tokens == 0
    first = ask(llm, "a")  # in the place of c, which was not used since
    assert in_memory.keys() == {digests["a"], digests["b"]}
    is_exact(references["a"], first)
    ask(llm, "c")
    assert in_memory.keys() == {digests["a"], digests["c"]}
    again = ask(llm, "b")
    assert again.num_cached_tokens == 64  # its blocks stayed
    is_exact(references["b"], again)

    write_adapter(folders["a"], module, 31)  # meanwhile not in memory
    changed = merged(module, folders["a"])
    with pytest.raises(AdapterChangedError, match="'a'"):
        ask(llm, "a")
    (folders["a"] / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterChangedError):
        ask(llm, "a")
    assert not llm.engine.has_unfinished and num_acquired(llm) == 0
    with pytest.raises(AdapterFileError):
        llm.load_adapter("a", folders["a"], replace=True)
    write_adapter(folders["a"], module, 31)
    assert llm.load_adapter("a", folders["a"], replace=True).digest != digests["a"]
    output = ask(llm, "a")
    assert output.num_cached_tokens == 0
    is_exact(changed, output)
    assert deviation(references["a"], output) > APART


def test_overwritten_files_of_an_adapter_in_memory_change_nothing(module: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", module, 11)
    old = merged(module, folder)
    llm = LLM(module, num_blocks=64, dtype="float32")
    llm.load_adapter("x", folder)
    is_exact(old, ask(llm, "x"))
    write_adapter(folder, module, 12)
    output = ask(llm, "x")
    assert output.num_cached_tokens == 64
    is_exact(old, output)


def test_adapters_in_use_are_not_evicted(module: Any, folders: dict[str, Path]) -> None:
    llm = make_llm(module, folders, max_loras=1)
    running = llm.stream(PROMPT, PARAMS, adapter="mlp")
    next(running)
    with pytest.raises(AdapterLimitError, match="max_loras"):
        ask(llm, "all")
    assert ask(llm).outputs[0].finish_reason == "length"
    running.close()
    assert num_acquired(llm) == 0  # an abort lets go, too
    assert ask(llm, "all").outputs[0].finish_reason == "length"


def test_a_name_is_not_taken_twice_unless_asked(module: Any, folders: dict[str, Path]) -> None:
    llm = make_llm(module, folders)
    before = llm.engine.adapters
    with pytest.raises(DuplicateAdapterError, match="'mlp'"):
        llm.load_adapter("mlp", folders["all"])
    assert llm.engine.adapters == before
    assert llm.load_adapter("mlp", folders["all"], replace=True).digest == before[0].digest
    with pytest.raises(UnknownAdapterError, match="attention"):
        llm.unload_adapter("none")


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_layer_that_was_replaced_fails_the_step_and_is_not_passed_over(folders: dict[str, Path]) -> None:
    altered = make_tiny_llama()
    llm = make_llm(altered, folders)
    assert ask(llm, "mlp").error is None
    block = altered.model.layers[1].mlp
    own, block.up_proj = block.up_proj, torch.nn.Linear(64, 176, bias=False)
    output = ask(llm, "mlp", ids(9, 20))
    assert output.outputs[0].finish_reason == "error" and "altered" in output.error
    block.up_proj = own
    assert ask(llm, "mlp", ids(9, 20)).error is None
    assert num_acquired(llm) == 0


def test_a_refused_request_holds_no_adapter(module: Any, folders: dict[str, Path]) -> None:
    llm = make_llm(module, folders)
    params = SamplingParams(max_tokens=1)
    llm.engine.add_request("a", PROMPT, params, adapter="mlp")
    for arguments in (("a", PROMPT), ("b", []), ("c", [400]), ("d", ids(1, 4096))):
        with pytest.raises(ValueError):
            llm.engine.add_request(*arguments, params, adapter="all")
    with pytest.raises(UnknownAdapterError):
        llm.engine.add_request("e", PROMPT, params, adapter=["all"])
    assert num_acquired(llm) == 1
    llm.engine.abort("a")
    assert num_acquired(llm) == 0
