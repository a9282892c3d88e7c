"""Text from people: arguments, files, stdin. Refuses what is not UTF-8 or is empty. Knows no model."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from anaphora.errors import EmptyPromptError, InvalidParameterError

_STDIN = "stdin"


def read_prompts(arguments: list[str], files: list[Path]) -> list[str]:
    """Arguments first, then files, in the order given; piped stdin where there is neither.

    One final newline of a file or of stdin is dropped: editors and `echo` put it there.
    Raises InvalidParameterError, EmptyPromptError, typer.BadParameter.
    """
    if arguments.count("-") > 1:
        raise typer.BadParameter("- stands for stdin, which can be read once only")
    if not arguments and not files:
        text = "" if sys.stdin is None or sys.stdin.isatty() else _read_stdin()
        if not text:
            raise typer.BadParameter("no prompt: give one as an argument, with --file, or on stdin")
        return [text]
    sources = [("argument", text) if text != "-" else (_STDIN, _read_stdin()) for text in arguments]
    sources += [(str(path), _read_file(path)) for path in files]
    for number, (source, text) in enumerate(sources, start=1):
        check_utf8(text, source)
        if not text:
            raise EmptyPromptError(f"prompt {number} of {len(sources)} ({source}) is empty: give it some text")
    return [text for _, text in sources]


def check_utf8(text: str, source: str) -> None:
    """Raises InvalidParameterError for the stand-ins (lone surrogates) of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError(f"{source} is not UTF-8 text: invalid byte at character {error.start}") from None


def not_utf8(source: str, error: UnicodeDecodeError) -> InvalidParameterError:
    return InvalidParameterError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}")


def _read_stdin() -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise not_utf8(_STDIN, error) from None
    check_utf8(text, _STDIN)
    return text.removesuffix("\n")


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise not_utf8(str(path), error) from None
