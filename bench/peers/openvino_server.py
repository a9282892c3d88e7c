"""OpenVINO GenAI behind `/v1/completions`, as far as `anaphora bench` needs it: the package itself brings no server.

    python -m venv ov && ov/bin/pip install openvino-genai==2026.4.1
    ov/bin/python bench/peers/openvino_server.py MODEL.gguf --port 8103 --cache-tokens 16384 --threads 2

MODEL: a GGUF file, or a folder in OpenVINO's own format. Its continuous-batching pipeline, with prefix caching on.
Prompts are token ids; the text of a token is its id in brackets, so that no detokenizer stands between the engine and
the clock. Of OpenAI's API only what the benchmark sends. Needs nothing of Anaphora.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino
import openvino_genai

BLOCK = 32  # tokens in a block of OpenVINO's CPU plugin


class Pipeline:
    """One thread steps; others wait for their tokens in a queue each."""

    def __init__(self, model: str, cache_tokens: int, threads: int, caching: bool) -> None:
        config = openvino_genai.SchedulerConfig()
        config.num_kv_blocks = -(-cache_tokens // BLOCK)
        config.enable_prefix_caching = caching
        config.dynamic_split_fuse = True
        self.name = model.rsplit("/", 1)[-1]
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._arrivals: queue.Queue[tuple[list[int], int, queue.Queue[int | None]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[int]:
        tokens: queue.Queue[int | None] = queue.Queue()
        self._arrivals.put((prompt, max_tokens, tokens))
        while (token := tokens.get()) is not None:
            yield token

    def _run(self) -> None:
        live: list[tuple[Any, int, queue.Queue[int | None]]] = []
        number = 0
        while True:
            while not live or not self._arrivals.empty():
                prompt, max_tokens, tokens = self._arrivals.get()
                options = openvino_genai.GenerationConfig()
                options.max_new_tokens, options.ignore_eos, options.do_sample = max_tokens, True, False
                ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
                live.append((self._pipeline.add_request(number, ids, options), max_tokens, tokens))
                number += 1
            self._pipeline.step()
            still = []
            for handle, left, tokens in live:
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            tokens.put(token)
                            left -= 1
                if left > 0:
                    still.append((handle, left, tokens))
                else:
                    tokens.put(None)
            live = still


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    pipeline: Pipeline

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: nothing but the engine is to take time."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._answer(200, {"data": [{"id": self.pipeline.name}]})
        if self.path == "/version":
            return self._answer(200, {"openvino_genai": openvino_genai.__version__})
        self._answer(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path != "/v1/completions":
            return self._answer(404, {"error": {"message": f"no {self.path}"}})
        if "cache_salt" in body or "return_timings" in body:
            return self._answer(400, {"error": {"message": "not taken: cache_salt, return_timings"}})
        prompt = body["prompt"]
        if isinstance(prompt, str):  # the probe's; what is measured comes as ids
            prompt = list(prompt.encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = 0
        for token in self.pipeline.stream(prompt, body["max_tokens"]):
            count += 1
            reason = "length" if count == body["max_tokens"] else None
            self._event({"choices": [{"index": 0, "text": f"[{token}]", "finish_reason": reason}]})
        self._event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}})
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8103)
    parser.add_argument("--cache-tokens", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-prefix-caching", action="store_true")
    args = parser.parse_args()
    Handler.pipeline = Pipeline(args.model, args.cache_tokens, args.threads, not args.no_prefix_caching)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    print(f"ready: {args.model} at http://127.0.0.1:{args.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
