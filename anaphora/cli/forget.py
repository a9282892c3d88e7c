"""`anaphora forget`: a running server forgets a tenant, a salt, an adapter or a prefix. Must not import torch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from anaphora.cli import console
from anaphora.cli.options import JsonFlag
from anaphora.cli.running_server import RunningServer
from anaphora.errors import ConfigError, InvalidParameterError, ServerUnreachableError

_TIMEOUT_S = 60.0


def forget(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running server, such as http://127.0.0.1:8000.")],
    api_key: Annotated[
        str | None, typer.Option(envvar="ANAPHORA_API_KEY", help="A key; better in the environment.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="All that is this tenant's, or whose salt or prompt is meant; for admins.")
    ] = None,
    salt: Annotated[
        str | None, typer.Option("--cache-salt", "--salt", help="What was cached under this cache_salt.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A LoRA adapter's name, or its digest; for admins.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What begins with this text, under that salt and --model.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="The same as token ids, separated by commas.")] = None,
    model: Annotated[str | None, typer.Option(help="The adapter that the prompt ran with.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Let nobody find what a server has cached of a prompt, a salt, an adapter or a tenant. What runs goes on."""
    if prompt is not None and prompt_ids is not None:
        raise ConfigError("give --prompt or --prompt-ids, not both")
    fields = {
        "tenant": tenant,
        "cache_salt": salt,
        "adapter": adapter,
        "prompt": prompt if prompt_ids is None else _numbers(prompt_ids),
        "model": model,
    }
    server = RunningServer(url, api_key, _TIMEOUT_S)
    reply = _post(server, {name: value for name, value in fields.items() if value is not None})
    if as_json:
        console.print_json(reply)
        return
    num_tokens = reply.get("num_tokens")
    whole = "" if num_tokens is None else f": all that begins with its first {num_tokens} tokens"
    console.stdout().print(f"forgotten: {reply['forgotten']}{whole}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--prompt-ids must be integers separated by commas, got {text[:80]!r}") from None


def _post(server: RunningServer, fields: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidParameterError for what the server refuses, ServerUnreachableError."""
    status, text = server.post("/forget_prefix_cache", fields)
    try:
        reply = json.loads(text)
        message = None if status == 200 else reply["error"]["message"]
        if message is None and "forgotten" not in reply:
            raise KeyError("forgotten")
    except (ValueError, KeyError, TypeError):
        raise ServerUnreachableError(
            f"{server.url} answers {status} and is no Anaphora server: check the URL"
        ) from None
    if message is not None:
        raise InvalidParameterError(f"the server refuses ({status}): {message}")
    return dict(reply)
