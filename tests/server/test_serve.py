"""`anaphora serve` as a process: the ready line, the configuration file, and the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_world import PATIENCE_S, make_tokenizer

from anaphora.cli.main import main


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


class Process:
    """A server process; url and the words of its ready line."""

    def __init__(self, *arguments: str) -> None:
        start = "import sys; from anaphora.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "serve", "--port", "0", "--num-threads", "1", "--dtype", "float32"]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        watch = threading.Timer(PATIENCE_S, self.process.kill)
        watch.start()
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline().strip()
        watch.cancel()
        assert self.ready, self.process.communicate()[1]
        self.url = self.ready.partition(" at ")[2].partition(",")[0]

    def end(self) -> tuple[int, str]:
        """Exit code and what it said on stderr, after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            _, errors = self.process.communicate(timeout=PATIENCE_S)
        finally:
            self.process.kill()
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def process(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    config = tmp_path_factory.mktemp("config") / "serve.toml"
    config.write_text(
        'num-blocks = 64\nblock_size = 8\nserved_model_name = "from-file"\nrequest-timeout = 20.0\n'
        "prefix-caching = true\nmax_queue = 7\n"
    )
    running = Process(str(folder), "--config", str(config), "--served-model-name", "told", "--drain-timeout", "8")
    yield running
    running.process.kill()


def test_the_ready_line_the_options_and_a_drain_that_ends_with_exit_0(process: Process) -> None:
    # 4 layers, keys and values, 2 heads of 16 float32 each: 1,024 bytes a token; 64 blocks and the null block.
    size = f"64 blocks of 8 = 512 tokens, {65 * 8 * 1024:,} bytes"
    # 234,048 parameters and two buffers of the rotary embedding of 8 numbers each, float32
    assert process.ready == f"ready: told at {process.url}, weights 936,256 bytes, pool {size}"
    client = httpx2.Client(base_url=process.url, timeout=PATIENCE_S)
    assert client.get("/v1/models").json()["data"][0]["id"] == "told"  # the command line is stronger than the file
    body = {"prompt": [8, 9], "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx2.TransportError):  # nobody new comes in
            httpx2.get(process.url + "/health")
        data = [line for line in lines if line.startswith("data: ")]
    assert data[-1] == "data: [DONE]"  # and who was in is served to the end
    assert json.loads(data[-2][6:])["choices"][0]["finish_reason"] == "length"
    client.close()
    _, errors = process.process.communicate(timeout=PATIENCE_S)
    assert process.process.returncode == 0, errors
    (line,) = [line for line in errors.splitlines() if "anaphora.access" in line]
    entry = json.loads(line[line.index("{") :])
    assert (entry["outcome"], entry["output_tokens"], entry["cached_tokens"]) == ("finished", 400, 0)


def test_a_drain_that_takes_too_long_ends_its_requests_and_exits_0(folder: Path) -> None:
    running = Process(str(folder), "--num-blocks", "300", "--drain-timeout", "1")
    body = {"prompt": [8, 9], "max_tokens": 4000, "temperature": 0, "stream": True, "n": 8, "ignore_eos": True}
    with httpx2.stream("POST", running.url + "/v1/completions", json=body, timeout=PATIENCE_S) as reply:
        lines = reply.iter_lines()
        next(lines)
        code, errors = running.end()
        data = [line for line in lines if line]
    assert json.loads(data[-2].removeprefix("data: "))["error"]["code"] == "shutdown"
    assert code == 0, errors
    assert '"outcome": "shutdown"' in errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_block = 3", "num_block"),
        ("num_blocks = ", "cannot be read"),
        ("num_blocks = 'x'", "num-blocks"),
        ("num_blocks = true", "sets --num-blocks to true, and it is no switch"),
        ("num_blocks = 3\nnum-blocks = 4", "sets num-blocks twice"),
        ("lora = 'a'", "--lora must look like NAME=FOLDER"),
        ("host = ''", "host is empty"),
        ("port = 65536", "--port must be from 0 to 65535, got 65536"),
    ],
)
def test_a_wrong_configuration_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert main(["serve", str(folder), "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_and_a_missing_key_file_are_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from anaphora.server.run import bind

    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        assert main(["serve", "no-such-model", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err
    assert main(["serve", "no-such-model", "--api-key-file", str(tmp_path / "none")]) == 2
    assert "key file" in capsys.readouterr().err
    (tmp_path / "secret").write_text("fifteen letters")
    assert main(["serve", "no-such-model", "--secret-file", str(tmp_path / "secret")]) == 2
    assert "the server secret has 15 bytes" in capsys.readouterr().err
    assert main(["serve", "no-such-model", "--share-cache", "a,b"]) == 2
    assert "without a key file there are none: give --api-key-file" in capsys.readouterr().err
    (tmp_path / "keys").write_text("key a")
    assert main(["serve", "no-such-model", "--api-key-file", str(tmp_path / "keys"), "--share-cache", "a,b"]) == 2
    assert "--share-cache names tenants that have no key: b" in capsys.readouterr().err


def test_an_adapter_that_no_model_could_take_is_told_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anaphora.api.build.build_engine", lambda *_, **__: pytest.fail("loaded"))
    assert main(["serve", str(folder), "--port", "0", "--lora", f"x={tmp_path}"]) == 2
    assert capsys.readouterr().err.endswith("cannot be used: there is no file adapter_config.json\n")


def test_sigterm_before_the_ready_line_ends_it_with_exit_0(folder: Path) -> None:
    command = [sys.executable, "-m", "anaphora", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "loading" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        shown = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, *shown) == (0, "", "")


def test_the_ready_line_does_not_take_a_pool_that_groups_share_for_one_table() -> None:
    from anaphora.cli.serve import pool_size

    assert pool_size(64, 8, 512, 1000) == "64 blocks of 8 = 512 tokens, 1,000 bytes"
    assert pool_size(128, 16, 336, None) == ("128 blocks of 16 shared by groups of layers, 336 tokens of one request")


def test_every_option_of_the_server_can_be_set_from_the_command_line() -> None:
    import dataclasses

    from anaphora.cli.serve import ServerOptions
    from anaphora.server.config import ServerConfig

    options = {field.name for field in dataclasses.fields(ServerOptions)}
    assert {field.name for field in dataclasses.fields(ServerConfig)} <= options
    assert ServerOptions().config() == ServerConfig()
