"""Time to tokenise a conversation of about 100,000 tokens that comes again one message longer, with and without a memo.

    python bench/tokenise.py [model] [rounds]

Milliseconds: least, median, most. `anew`: the tokenizer alone. `first`: the memo knows nothing of the text. `grown`: it
knows all but the last two messages. `again`: it knows all. Every round is another conversation, and each result is
compared with the tokenizer's own.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

from anaphora.engine.pieces import Pieces
from anaphora.engine.token_memo import MemoEncoder, TokenMemo
from anaphora.runtime.sources import default_cache_dir
from anaphora.runtime.sources.folder import load_tokenizer
from anaphora.runtime.sources.progress import Progress
from anaphora.runtime.sources.resolve import resolve_model

NUM_TOKENS = 100_000
TEXT = "the tide table of a small harbour lists high and low water hour by hour for every day in 2024, 31 or 1,024"
BORDERS = (("<|im_start|>", "<|im_end|>"), ("<start_of_turn>", "<end_of_turn>"), ("<|start_header_id|>", "<|eot_id|>"))


def main(model: str = "smollm2-135m", rounds: str = "5") -> None:
    tokenizer: Any = load_tokenizer(resolve_model(model, default_cache_dir(), Progress()).folder)
    known = set(tokenizer.get_vocab())
    begin, end = next(pair for pair in BORDERS if pair[0] in known)
    begin_s = time.perf_counter()
    encoder = MemoEncoder(tokenizer, Pieces(tokenizer), TokenMemo(64 << 20))
    print(f"{model}: checked in {1000 * (time.perf_counter() - begin_s):.0f} ms")
    times: dict[str, list[float]] = {"anew": [], "first": [], "grown": [], "again": []}
    num_tokens = 0
    for number in range(int(rounds)):
        messages, num_tokens = conversation(tokenizer, random.Random(number), begin, end)
        whole, before = "".join(messages), "".join(messages[:-2])
        expected = timed(times["anew"], lambda text=whole: tokenizer.encode(text, add_special_tokens=False))
        for name, text in (("first", before), ("grown", whole), ("again", whole)):
            got = timed(times[name], lambda text=text: encoder.encode(text, add_special_tokens=False, domain=""))
        assert got == expected
    print(f"{num_tokens:,} tokens in {len(messages)} messages")
    for name, values in times.items():
        print(f"{name:6s} {min(values):9.2f} {statistics.median(values):9.2f} {max(values):9.2f} ms")


def conversation(tokenizer: Any, draw: random.Random, begin: str, end: str) -> tuple[list[str], int]:
    messages: list[str] = []
    num_tokens, text = 0, TEXT.split()
    while num_tokens < NUM_TOKENS:
        words = " ".join(draw.choice(text) for _ in range(draw.randrange(20, 800)))
        message = f"{begin}{'assistant' if len(messages) % 2 else 'user'}\n{words}{end}\n"
        messages.append(message)
        num_tokens += len(tokenizer.encode(message, add_special_tokens=False))
    return messages, num_tokens


def timed(times_ms: list[float], function: Any) -> Any:
    begin_s = time.perf_counter()
    result = function()
    times_ms.append(1000 * (time.perf_counter() - begin_s))
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
