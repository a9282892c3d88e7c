"""`POST /v1/responses`: text in and out, whole or as a stream of typed events. Nothing is stored between requests."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from anaphora.engine.outputs import RequestOutput, StepOutput
from anaphora.engine.request_group import NewRequest
from anaphora.sampling_params import SamplingParams
from anaphora.server.arrival import Arrival
from anaphora.server.connection import event
from anaphora.server.errors import ApiError, invalid, unsupported
from anaphora.server.fields import ResponsesFields
from anaphora.server.generation import Job
from anaphora.server.messages import template_messages
from anaphora.server.sampling import ENGINE_NAMES, parse_salt, sampling_params
from anaphora.server.service import Service
from anaphora.server.shapes import timings

_NAMES = dict(ENGINE_NAMES) | {"max_tokens": "max_output_tokens", "json_schema": "text", "regex": "text"}


class ResponsesJob(Job):
    prompt_field = "input"
    names = _NAMES
    end_mark = b""

    def __init__(
        self,
        service: Service,
        fields: ResponsesFields,
        arrival: Arrival,
        prompt: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self.stream = bool(fields.stream)
        salt = service.domains.salt(arrival.caller, parse_salt(fields.cache_salt))
        self.requests = [
            NewRequest(
                prompt,
                params,
                cache_salt=salt,
                priority=fields.priority or 0,
                tenant=arrival.caller.tenant,
                adapter=service.adapter_of(fields),
            )
        ]
        self._fields = fields
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name_of(fields),
            "error": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": fields.text or {"format": {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        completion = output.outputs[0]
        is_cut = completion.finish_reason == "length"
        reply = {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item("incomplete" if is_cut else "completed", [self._part(completion.text)])],
            "usage": self._usage(output),
        }
        if self._fields.return_token_ids:
            reply |= {"prompt_token_ids": list(output.prompt_token_ids), "token_ids": list(completion.token_ids)}
        if self._fields.return_timings:
            reply["timings"] = timings(outputs)
        return reply

    def first_events(self) -> Iterable[bytes]:
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("response.content_part.added", **self._place(), part=self._part(""))

    def step_events(self, index: int, step: StepOutput) -> Iterable[bytes]:
        if step.text:
            yield self._event("response.output_text.delta", **self._place(), delta=step.text, logprobs=[])

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        whole = self.reply(outputs)
        (item,) = whole["output"]
        (part,) = item["content"]
        yield self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def error_events(self, error: ApiError) -> Iterable[bytes]:
        yield self._event("error", code=error.code, message=str(error), param=error.param)
        said = {"code": "server_error", "message": str(error)}  # one of the codes that a response may have
        failed = {**self._head, "status": "failed", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("response.failed", response=failed | {"error": said})

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        num_prompt, num_new = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_new,
        }


async def prepare_response(service: Service, body: bytes, arrival: Arrival) -> ResponsesJob:
    """Raises ApiError."""
    fields = await service.parse(ResponsesFields, body, arrival)
    parse_salt(fields.cache_salt)
    _check_unsupported(fields)
    items = _items(fields.input, service.config.max_messages)
    wanted = fields.max_output_tokens
    params = sampling_params(
        fields,
        service.config,
        max_tokens=max(1, fields.min_tokens or 0) if wanted is None else wanted,
        response_format=_format(fields.text),
        names=_NAMES,
    )

    _check_echoed(fields)

    def work() -> list[int]:
        service.engine.engine.check_grammar(params)
        before = [] if fields.instructions is None else [{"role": "system", "content": fields.instructions}]
        text = service.text.render(
            before + template_messages(items, "input"), tools=None, add_generation_prompt=True, template_options=None
        )
        domain = service.memo_domain(arrival.caller, parse_salt(fields.cache_salt))
        return service.text.prompt_ids(text, add_special_tokens=False, memo_domain=domain)

    prompt = await service.on_worker("input", arrival.tokenizing(work), _NAMES)
    room = params if wanted is not None else service.with_room(params, len(prompt))
    return ResponsesJob(service, fields, arrival, prompt, room)


def _items(given: Any, most: int) -> list[dict[str, Any]]:
    """The input as messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise invalid("input", "input must be a string or a non-empty list of messages")
    if len(given) > most:
        raise invalid("input", f"input has {len(given)} entries, at most {most} are allowed")
    for index, item in enumerate(given):
        if item.get("type", "message") != "message":
            raise unsupported(f"input[{index}]", f"this server reads messages only, not {str(item['type'])[:40]!r}")
    return [{k: v for k, v in item.items() if k not in ("type", "id", "status")} for item in given]


_FORMAT_KEYS = frozenset(("type", "name", "description", "strict", "schema", "regex"))


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as chat completions' `response_format`: the schema stands one level higher there."""
    if text is None:
        return None
    if text.keys() - {"format"}:
        raise unsupported("text", "text may hold a format only")
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.keys() - _FORMAT_KEYS:
        raise unsupported("text", f"text.format may hold {', '.join(sorted(_FORMAT_KEYS))} only")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": wanted}
    if wanted is not None and not isinstance(wanted, dict):
        raise invalid("text", "text.format must be an object")
    return wanted


def _check_unsupported(fields: ResponsesFields) -> None:
    for name, harmless in (
        ("previous_response_id", (None,)),
        ("background", (None, False)),
        ("tools", (None, [])),
        ("tool_choice", (None, "auto", "none")),
        ("parallel_tool_calls", (None, True)),
        ("include", (None, [])),
        ("reasoning", (None,)),
        ("truncation", (None, "disabled")),
    ):
        if getattr(fields, name) not in harmless:
            raise unsupported(name, f"this server cannot honour {name}: leave it out")


def _check_echoed(fields: ResponsesFields) -> None:
    """What comes back in the reply as it was sent: small, and without the numbers that JSON has not (NaN, 1e999)."""
    metadata = fields.metadata or {}
    if len(metadata) > 16 or not all(isinstance(text, str) and len(text) <= 512 for text in metadata.values()):
        raise invalid("metadata", "metadata may hold 16 strings of at most 512 characters")
    try:
        json.dumps(fields.text, allow_nan=False)
    except ValueError:
        raise invalid("text", "text holds a number that is not finite: leave it out") from None
