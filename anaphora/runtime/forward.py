"""One call of a `transformers` causal LM over a packed batch, with attention handed to a context.

Knows how the library is switched to our attention and back; knows nothing of plans and pools. Between calls
the module is as its owner left it, so that its own `generate` goes on working.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from anaphora.runtime.attention import ATTENTION_NAME, AttentionContext
from anaphora.runtime.features import InputRows
from anaphora.runtime.lora.context import AdapterContext
from anaphora.runtime.recurrent import RecurrentLayers


class _Hidden(BaseModelOutput):
    """A decoder's output that holds hidden states and nothing else, whatever the class around the decoder asks for."""

    def __getattr__(self, name: str) -> None:
        return None


class ModuleLock:
    """Held while a module is switched. A copy of the module, in memory or by way of a pickle, gets one of its own."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ModuleLock], tuple[()]]:
        return ModuleLock, ()


def module_lock(module: PreTrainedModel) -> ModuleLock:
    """Engines that share a module take turns: the switch is on the module, so its lock is, too."""
    lock: ModuleLock = vars(module).setdefault("_anaphora_lock", ModuleLock())
    return lock


def _decoder_of(module: PreTrainedModel) -> torch.nn.Module:
    """All of a causal LM but its head."""
    model: Any = module
    decoder: torch.nn.Module = model.get_decoder()
    models = [child for child in module.children() if isinstance(child, PreTrainedModel)]
    # Some classes give themselves, as their prefix is not that of their own decoder.
    return models[0] if decoder is module and len(models) == 1 else decoder


class PagedForward:
    """Calls `module` with packed tokens [1, num_tokens] and explicit positions.

    recurrent: its recurrent layers, which then take the context's states. attention: the name under which the context's
    attention is registered.
    """

    def __init__(
        self, module: PreTrainedModel, recurrent: RecurrentLayers | None = None, attention: str = ATTENTION_NAME
    ) -> None:
        model: Any = module  # the library's own annotations are partial
        self._module = model
        self._recurrent = recurrent
        self._attention = attention
        self._decoder = _decoder_of(module)
        # Parents come before children, which matters when the settings are restored: setting one sets its sub-configs.
        configs: list[Any] = [part.config for part in module.modules() if hasattr(part, "config")]
        self._configs = list({id(config): config for config in configs}.values())
        self._hidden: torch.Tensor | None = None
        self._lock = module_lock(module)

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        context: AttentionContext,
        adapters: AdapterContext | None = None,
        rows: InputRows = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [len(keep), vocab] of the packed tokens `keep`, and the final hidden states [num_tokens, hidden].

        input_ids, position_ids: [1, num_tokens] int64.
        rows: in place of token embeddings. The hidden states are None if the class hides its decoder.
        """
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(self._switched())
            if adapters is not None:
                stack.enter_context(adapters.switched())
            if self._recurrent is not None and context.states is not None:
                stack.enter_context(self._recurrent.switched(context.states))
            try:
                given = {"inputs_embeds": self._embed(input_ids, rows)} if rows else {"input_ids": input_ids}
                output = self._module(
                    **given,
                    position_ids=position_ids,
                    logits_to_keep=keep,
                    use_cache=False,
                    paged_context=context,
                )
                return output.logits[0], self._hidden
            finally:
                self._hidden = None

    def _embed(self, input_ids: torch.Tensor, rows: InputRows) -> torch.Tensor:
        """[1, num_tokens, hidden], as the model takes it."""
        embeddings: torch.Tensor = self._module.get_input_embeddings()(input_ids).clone()
        for begin, run in rows:
            embeddings[0, begin : begin + run.shape[0]] = run.to(embeddings.device, embeddings.dtype)
        return embeddings

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of final hidden states [n, hidden]: all that the model does after its decoder.

        The model's own forward runs with a decoder that gives these hidden states, so that a soft cap or a scale of its
        class has its part.
        """
        output = _Hidden(last_hidden_state=hidden.unsqueeze(0))
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        with self._lock:
            before = self._decoder.__dict__.get("forward")
            self._decoder.forward = lambda *args, **kwargs: output
            try:
                logits: torch.Tensor = self._module(input_ids=ids, use_cache=False).logits[0]
                return logits
            finally:
                if before is None:
                    del self._decoder.forward
                else:
                    self._decoder.forward = before

    @contextmanager
    def _switched(self) -> Iterator[None]:
        before = [(config, config._attn_implementation) for config in self._configs]
        for config in self._configs:
            config._attn_implementation = self._attention
        hook = self._decoder.register_forward_hook(self._keep_hidden)
        try:
            yield
        finally:
            hook.remove()
            for config, implementation in before:
                config._attn_implementation = implementation

    def _keep_hidden(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
        self._hidden = None if hidden is None else hidden[0]
