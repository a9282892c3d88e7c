"""Random traces in which every id has one parent, as lines of Mooncake's format."""

from __future__ import annotations

import json
import random

BLOCK = 512


def random_lines(seed: int, num_requests: int, max_blocks: int = 12) -> list[str]:
    """Prompts that walk down a growing tree of ids, and at times end exactly at a block's end."""
    draw = random.Random(seed)
    children: dict[int, list[int]] = {}
    next_id, lines, now = 0, [], 0
    for _ in range(num_requests):
        now += draw.randrange(2000)
        ids: list[int] = []
        length = draw.randrange(1, max_blocks * BLOCK) if draw.random() < 0.7 else draw.randint(1, max_blocks) * BLOCK
        for place in range(-(-length // BLOCK)):
            known = children.setdefault(ids[-1] if ids else -1, [])
            partial = (place + 1) * BLOCK > length
            if known and not partial and draw.random() < 0.8:
                ids.append(draw.choice(known))
            else:
                ids.append(next_id)
                if not partial:
                    known.append(next_id)
                next_id += 1
        entry = {"timestamp": now, "input_length": length, "output_length": draw.randrange(1, 400), "hash_ids": ids}
        lines.append(json.dumps(entry))
    return lines
