"""`anaphora serve`: one model over HTTP, with OpenAI's endpoints.

Every option can stand in a file (--config), under its long name; the command line overrules the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from anaphora.cli import console
from anaphora.cli.config_file import read_config
from anaphora.cli.options import EngineOptions, flatten_options
from anaphora.config import EngineConfig
from anaphora.errors import ConfigError
from anaphora.runtime.lora.folder import check_folder
from anaphora.runtime.sources.names import check_names
from anaphora.server.config import ServerConfig

_SERVER: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(ServerConfig)}


def _option(*flags: str, help: str) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Server")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Every field of ServerConfig, and where to listen and who may call."""

    host: Annotated[str, _option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _option(help="Port to listen on; 0 takes a free one.")] = 8000
    api_key_file: Annotated[
        Path | None,
        _option(help="Lines of KEY TENANT [admin], or JSON: only these keys may call. See docs/security.md."),
    ] = None
    secret_file: Annotated[
        Path | None, _option(help="Secret of the tenants' salts; without it every start draws another one.")
    ] = None
    lora: Annotated[
        list[str] | None, _option("--lora", help="NAME=FOLDER: a LoRA adapter that requests may name. Repeatable.")
    ] = None
    served_model_name: Annotated[str | None, _option(help="What requests call the model.")] = _SERVER[
        "served_model_name"
    ]
    share_cache: Annotated[
        list[str] | None, _option(help="TENANT,TENANT,...: these share cached beginnings. Repeatable.")
    ] = None
    open_metrics: Annotated[
        bool, _option("--open-metrics", help="Let anybody read /metrics, in spite of a key file.")
    ] = _SERVER["open_metrics"]
    allow_remote_images: Annotated[
        bool, _option("--allow-remote-images", help="Fetch images by http(s) URLs, from public addresses only.")
    ] = _SERVER["allow_remote_images"]
    remote_image_timeout_s: Annotated[
        float, _option("--remote-image-timeout", help="Most seconds to fetch a request's images.")
    ] = _SERVER["remote_image_timeout_s"]
    max_remote_image_bytes: Annotated[int, _option(help="Most bytes of an image that is fetched.")] = _SERVER[
        "max_remote_image_bytes"
    ]
    max_image_fetches: Annotated[int, _option(help="Requests whose images are fetched at a time.")] = _SERVER[
        "max_image_fetches"
    ]
    max_queue: Annotated[int, _option(help="Requests that may wait besides those that run.")] = _SERVER["max_queue"]
    request_timeout_s: Annotated[float, _option("--request-timeout", help="Most seconds of one request.")] = _SERVER[
        "request_timeout_s"
    ]
    heartbeat_s: Annotated[
        float, _option("--heartbeat", help="Seconds of silence after which a stream sends a comment.")
    ] = _SERVER["heartbeat_s"]
    keep_alive_timeout_s: Annotated[
        float, _option("--keep-alive-timeout", help="Seconds that an idle connection is kept.")
    ] = _SERVER["keep_alive_timeout_s"]
    drain_timeout_s: Annotated[
        float, _option("--drain-timeout", help="Seconds that running requests have after SIGTERM.")
    ] = _SERVER["drain_timeout_s"]
    max_body_bytes: Annotated[int, _option(help="Largest body.")] = _SERVER["max_body_bytes"]
    max_prompts: Annotated[int, _option(help="Most prompts of one completion request.")] = _SERVER["max_prompts"]
    max_n: Annotated[int, _option(help="Most choices of one prompt.")] = _SERVER["max_n"]
    max_messages: Annotated[int, _option(help="Most messages of one conversation.")] = _SERVER["max_messages"]
    max_tools: Annotated[int, _option(help="Most tools of one conversation.")] = _SERVER["max_tools"]
    max_logit_bias: Annotated[int, _option(help="Most entries of logit_bias.")] = _SERVER["max_logit_bias"]
    max_stop_chars: Annotated[int, _option(help="Longest stop string, in characters.")] = _SERVER["max_stop_chars"]
    max_stop_token_ids: Annotated[int, _option(help="Most entries of stop_token_ids.")] = _SERVER["max_stop_token_ids"]
    max_embedding_rows: Annotated[int, _option(help="Most rows of numbers of one embedding request.")] = _SERVER[
        "max_embedding_rows"
    ]
    num_text_workers: Annotated[int, _option(help="Threads that tokenise and render.")] = _SERVER["num_text_workers"]
    token_memo_bytes: Annotated[
        int, _option(help="Memory for the tokens of text that may come again; 0 keeps none.")
    ] = _SERVER["token_memo_bytes"]

    def adapters(self) -> list[tuple[str, str]]:
        """(name, folder) pairs. Raises ConfigError."""
        pairs = [(name, folder) for name, _, folder in (entry.partition("=") for entry in self.lora or ())]
        if not all(name and folder for name, folder in pairs):
            raise ConfigError("--lora must look like NAME=FOLDER")
        if len(dict(pairs)) < len(pairs):
            raise ConfigError("--lora gives one name twice: each adapter needs its own")
        return pairs

    def config(self) -> ServerConfig:
        """Raises ConfigError."""
        values = {name: getattr(self, name) for name in _SERVER}
        groups = tuple(frozenset(filter(None, group.split(","))) for group in self.share_cache or ())
        return ServerConfig(**{**values, "share_cache": groups})


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While the model is loaded, too: to the first process of a container SIGTERM means nothing by itself."""
    if threading.current_thread() is not threading.main_thread():  # it alone gets signals
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


@flatten_options
@_ended_by_sigterm()
def serve(
    model_name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model, and stronger.", show_default=False)
    ] = None,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            is_eager=True,
            callback=read_config,
            exists=True,
            dir_okay=False,
            help="TOML or JSON with options of this command by their long names; the command line overrules it.",
        ),
    ] = None,
    engine: EngineOptions,
    server: ServerOptions,
) -> None:
    """Serve a model over HTTP, with OpenAI's endpoints, until SIGTERM or Ctrl-C."""
    try:
        from anaphora.server.app import build_app
        from anaphora.server.run import Server, bind
        from anaphora.server.tenants import check_secret, check_sharing, load_api_keys
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs the package {error.name}: pip install starlette uvicorn pydantic prometheus-client"
        ) from error

    server_config = server.config()
    api_keys = None if server.api_key_file is None else load_api_keys(server.api_key_file)
    check_sharing(server_config.share_cache, api_keys)
    secret = None if server.secret_file is None else _read_secret(server.secret_file)
    if secret is not None:
        check_secret(secret)
    options = dataclasses.asdict(engine) | ({} if model_name is None else {"model": model_name})
    options["warm_up"] = options["warm_up"] is not False
    engine_config = EngineConfig(**options)
    adapters = server.adapters()
    if (server_config.served_model_name or options["model"]) in dict(adapters):
        raise ConfigError("--lora may not give an adapter the name of the model: choose another one")
    listener = bind(server.host, server.port)  # before the model is loaded: a taken port is told at once
    check_names(engine_config.model, engine_config.tokenizer)
    for _, folder in adapters:
        check_folder(os.path.expanduser(folder), max_rank=engine_config.max_lora_rank)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if api_keys is None and server.host not in _LOCAL:
        logging.getLogger(__name__).warning("no key file: everybody who reaches %s may call, and reset", server.host)

    from anaphora.api.build import build_engine  # brings torch: not before the options are right

    logging.getLogger(__name__).info("loading %s", engine_config.model)
    running = build_engine(engine_config, progress=True)
    for name, folder in adapters:
        running.load_adapter(name, folder)
    app = build_app(
        running,
        server_config,
        model_name=str(options["model"]),
        max_num_seqs=engine_config.max_num_seqs,
        api_keys=api_keys,
        secret=secret,
    )

    def on_ready() -> None:
        # What was loaded stays. Collections that walk through all of it stop every thread, for 0.1 s and more.
        gc.collect()
        gc.freeze()
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        size = pool_size(running.num_blocks, running.block_size, running.capacity_tokens, running.kv_cache_bytes)
        weights = f"weights {running.weights_bytes or 0:,} bytes"
        name = server_config.served_model_name or options["model"]
        console.stdout().print(f"ready: {name} at {url}, {weights}, pool {size}")
        sys.stdout.flush()

    Server(app, server_config, on_ready=on_ready).run([listener])


_LOCAL = ("127.0.0.1", "::1", "localhost")


def pool_size(num_blocks: int, block_size: int, capacity_tokens: int, num_bytes: int | None) -> str:
    """The pool in blocks, tokens and bytes. Where groups of layers share it, blocks are no measure of tokens."""
    tokens = f"= {capacity_tokens:,} tokens"
    if capacity_tokens != num_blocks * block_size:
        tokens = f"shared by groups of layers, {capacity_tokens:,} tokens of one request"
    memory = "" if num_bytes is None else f", {num_bytes:,} bytes"
    return f"{num_blocks:,} blocks of {block_size} {tokens}{memory}"


def _read_secret(path: Path) -> bytes:
    """Raises ConfigError."""
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the secret file {path} cannot be read: {error}") from error
