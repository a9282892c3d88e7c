"""`POST /v1/embeddings`: text or token ids in, one or several of them; vectors out.

A row of numbers is the model's final hidden state: of the last token, of all on average, or of each (`pooling`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

from anaphora.core.plan import Embedding
from anaphora.engine.outputs import RequestOutput, StepOutput
from anaphora.engine.request_group import NewRequest
from anaphora.errors import InvalidParameterError
from anaphora.pooling_params import PoolingParams
from anaphora.sampling_params import SamplingParams, embedding_params
from anaphora.server.arrival import Arrival
from anaphora.server.completions import prompt_list
from anaphora.server.connection import Connection
from anaphora.server.errors import invalid, unsupported
from anaphora.server.fields import EmbeddingFields
from anaphora.server.generation import Job
from anaphora.server.sampling import ENGINE_NAMES, parse_salt
from anaphora.server.service import Service

ENCODINGS = ("float", "base64")


class EmbeddingsJob(Job):
    """A vector for each input."""

    stream = False
    prompt_field = count_field = "input"
    names = ENGINE_NAMES

    def __init__(
        self,
        service: Service,
        fields: EmbeddingFields,
        arrival: Arrival,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> None:
        salt = service.domains.salt(arrival.caller, parse_salt(fields.cache_salt))
        tenant, adapter = arrival.caller.tenant, service.adapter_of(fields)
        priority = fields.priority or 0
        self.requests = [
            NewRequest(prompt, params, cache_salt=salt, priority=priority, tenant=tenant, adapter=adapter)
            for prompt in prompts
        ]
        self._engine = service.engine
        self._model_name = service.name_of(fields)
        self._as_base64 = fields.encoding_format == "base64"
        self._is_list_of_rows = fields.pooling == "token"

    async def send_reply(self, connection: Connection, outputs: Sequence[RequestOutput]) -> None:
        await connection.send_encoded(200, await self._engine.in_worker(self._encoded, outputs))

    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """All but the numbers, which take too long for the event loop: see send_reply."""
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        }
        return {"object": "list", "model": self._model_name, "usage": usage}

    def step_events(self, index: int, step: StepOutput) -> Iterable[bytes]:
        raise NotImplementedError("embeddings do not come in a stream")

    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        raise NotImplementedError("embeddings do not come in a stream")

    def _encoded(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Piece by piece, so that other threads have their turn."""
        data = []
        for index, output in enumerate(outputs):
            if output.embedding is None:
                raise RuntimeError("a request that finished gave no embedding: a bug in the executor")
            rows = [row_text(row) for row in self._rows(output.embedding)]
            shown = f"[{', '.join(rows)}]" if self._is_list_of_rows else rows[0]
            data.append(f'{{"object": "embedding", "index": {index}, "embedding": {shown}}}')
        return f'{json.dumps(self.reply(outputs))[:-1]}, "data": [{", ".join(data)}]}}'.encode()

    def _rows(self, embedding: Embedding) -> Iterable[str | list[float]]:
        if not self._as_base64:
            return embedding.rows()
        size, values = 4 * embedding.size, embedding.values
        return (base64.b64encode(values[begin : begin + size]).decode() for begin in range(0, len(values), size))


def row_text(row: str | list[float]) -> str:
    """A row as JSON. Nine digits tell every float32 apart."""
    return f'"{row}"' if isinstance(row, str) else f"[{', '.join(map('{:.9g}'.format, row))}]"


async def prepare_embeddings(service: Service, body: bytes, arrival: Arrival) -> EmbeddingsJob:
    """Raises ApiError."""
    fields = await service.parse(EmbeddingFields, body, arrival)
    parse_salt(fields.cache_salt)
    if fields.encoding_format not in (None, *ENCODINGS):
        raise invalid("encoding_format", f"encoding_format must be one of {', '.join(ENCODINGS)}")
    params = _params(service, fields)
    given = prompt_list(fields.input, service.config, "input")

    def work() -> list[list[int]]:
        special = fields.add_special_tokens is not False
        domain = service.memo_domain(arrival.caller, parse_salt(fields.cache_salt))
        return [service.text.prompt_ids(one, add_special_tokens=special, memo_domain=domain) for one in given]

    prompts = await service.on_worker("input", arrival.tokenizing(work))
    num_rows = sum(map(len, prompts)) if fields.pooling == "token" else len(prompts)
    if num_rows > service.config.max_embedding_rows:
        message = f"the reply would have {num_rows} rows, at most {service.config.max_embedding_rows} are allowed"
        raise invalid("input", message)
    return EmbeddingsJob(service, fields, arrival, prompts, params)


def _params(service: Service, fields: EmbeddingFields) -> SamplingParams:
    """Raises ApiError."""
    try:
        pooling = PoolingParams(
            "last" if fields.pooling is None else fields.pooling, fields.normalize is not False, fields.dimensions
        )
    except InvalidParameterError as error:  # its messages begin with the field
        raise invalid(str(error).partition(" ")[0], str(error)) from None
    params = embedding_params(pooling)
    try:
        service.engine.engine.check_pooling(params)
    except InvalidParameterError as error:
        raise unsupported("pooling" if fields.dimensions is None else "dimensions", str(error)) from None
    return params
