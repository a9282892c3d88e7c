"""Whether a module's owner has given it something to do that a loop over its parts would not do.

Knows hooks, attributes and submodules; knows nothing of what a module computes. Weights may change: whoever runs the
parts reads them anew.
"""

from __future__ import annotations

from itertools import repeat
from operator import contains, is_not
from typing import Any

import torch
from torch.nn.modules import module as torch_module


class ModuleWatch:
    """Remembers a module as it is now."""

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._hooks: list[Any] = [part._forward_hooks for part in modules]
        self._hooks += [part._forward_pre_hooks for part in modules]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._attributes = [vars(part) for part in modules]
        children = [(part._modules, name, child) for part in modules for name, child in part._modules.items()]
        self._parents, self._names, self._children = zip(*children, strict=True)

    def is_changed(self) -> bool:
        """Whether there is a hook now, or a submodule or a forward was replaced.

        Asked at every step of hundreds of submodules, so no line of Python runs for each of them.
        """
        return (
            any(self._hooks)
            or any(map(contains, self._attributes, repeat("forward")))
            or any(map(is_not, map(dict.get, self._parents, self._names), self._children))
        )
