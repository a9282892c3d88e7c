"""Errors in the words of the command line: what a message calls `num_blocks`, somebody typed as `--num-blocks`.

Knows a command's options; must not know which errors there are.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

_ONE_OF_MANY = MappingProxyType({"stop_token_ids": "stop_token_id"})
"""Lists of which the command line takes one entry at a time."""

_NOT_INSIDE = r"[\w./'\"-]"
"""Beside a name: then it is part of a path, of a value that is quoted, or of a longer name."""


def in_flags(message: str, command: Any) -> str:
    """A message with the names of this command's options as its flags.

    A name of one word is a word like others: it is an option's where the message begins with what is wrong with it.
    """
    flags = {
        parameter.name: max((name for name in parameter.opts), key=len)
        for parameter in command.params
        if parameter.param_type_name == "option"
    }
    flags |= {name: flags[one] for name, one in _ONE_OF_MANY.items() if one in flags}
    long = "|".join(sorted((re.escape(name) for name in flags if "_" in name), key=len, reverse=True))
    short = "|".join(re.escape(name) for name in flags if "_" not in name)
    if long:
        found = rf"(?<!{_NOT_INSIDE})({long})(?!{_NOT_INSIDE}\w|\w)"
        message = re.sub(found, lambda match: flags[match[1]], message)
    if short:
        message = re.sub(rf"^({short})(?=: | must | needs | holds )", lambda match: flags[match[1]], message)
    return message
