"""From logits to tokens: one row of logits and one SamplingParams for each token to choose.

Knows logits and sampling parameters; knows nothing of plans, blocks and models. Order of operations on a row:

    raw logits (float32) -> logprobs and ranks
      -> repetition, presence, frequency penalty -> logit bias -> banned tokens
      -> greedy: the largest, lowest id among equals
      -> temperature -> min-p -> top-k -> top-p -> draw

Filters keep tokens likeliest first, lowest id first among equals. The draw is an inverse CDF in token order over what
is kept, in float64, at one uniform number that is a hash of (seed, position): the choice depends on the row, the seed
and the position only, not on the rest of the batch, a generator's state, or how the prompt was chunked.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anaphora.core.ids import TokenId
from anaphora.core.plan import SampledToken
from anaphora.runtime.float_bits import largest
from anaphora.sampling_params import SamplingParams

# Rows are drawn in chunks of at most this many logits, so that float64 copies stay in the processor's cache.
CHUNK_LOGITS = 1 << 17

# The logit of a banned token. Finite, so that a row in which all are banned still gives one of them.
LOWEST = torch.finfo(torch.float32).min


class TokenCounts:
    """What penalties need to know of one request's tokens, kept up to date token by token.

    seen: [vocab] bool, in the prompt or the output. output_counts: [vocab] float32, times in the output.
    """

    def __init__(self, vocab_size: int, num_prompt_tokens: int, device: torch.device) -> None:
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.output_counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.num_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens

    def extend(self, start: int, token_ids: Sequence[TokenId]) -> None:
        """Take in the tokens at positions [start, start + len(token_ids)); those known already are skipped."""
        new = token_ids[max(0, self.num_tokens - start) :]
        if not new:
            return
        ids = torch.tensor(new, dtype=torch.int64, device=self.seen.device)
        self.seen[ids] = True
        outputs = ids[max(0, self._num_prompt_tokens - self.num_tokens) :]
        self.output_counts.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.float32))
        self.num_tokens += len(new)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits becomes a token.

    position: of the token to choose. counts: None without penalties. banned: token ids that are not to be chosen,
    while there is another one. allowed: [vocab] bool on the CPU, the tokens that may be chosen; None: all.
    """

    params: SamplingParams
    seed: int
    position: int
    counts: TokenCounts | None = None
    banned: Collection[int] = ()
    allowed: torch.Tensor | None = None

    @property
    def is_adjusted(self) -> bool:
        """Whether logits change before the choice."""
        return bool(self.counts is not None or self.params.logit_bias or self.banned or self.allowed is not None)

    @property
    def is_plain(self) -> bool:
        """Whether the token is that of the largest logit, and nothing else is asked."""
        return self.params.temperature == 0.0 and self.params.logprobs is None and not self.is_adjusted


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a hash of (seed mod 2**64, position)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose one token for each row of logits [len(rows), vocab]; they are finite and stay as they are."""
    if all(row.is_plain for row in rows):
        return [SampledToken(TokenId(token)) for token in largest(logits)]
    raw = logits.float()
    adjusted = _adjust(raw, rows)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0.0]
    tokens = largest(adjusted) if len(drawn) < len(rows) else [0] * len(rows)
    per_chunk = max(1, CHUNK_LOGITS // raw.shape[1])
    for begin in range(0, len(drawn), per_chunk):
        chunk = drawn[begin : begin + per_chunk]
        picked = adjusted if len(chunk) == len(rows) else adjusted[chunk]
        for i, token in zip(chunk, _draw(picked, [rows[i] for i in chunk]), strict=True):
            tokens[i] = token
    result = [SampledToken(TokenId(token)) for token in tokens]
    reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if reported:
        picked = raw if len(reported) == len(rows) else raw[reported]
        num_top = [rows[i].params.logprobs or 0 for i in reported]
        for i, entry in zip(reported, report(picked, [tokens[i] for i in reported], num_top), strict=True):
            result[i] = entry
    return result


def _adjust(raw: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Penalties, then bias, then bans. Returns `raw` itself if no row wants any."""
    if not any(row.is_adjusted for row in rows):
        return raw
    adjusted = raw.clone()
    largest = torch.finfo(raw.dtype).max
    for line, row in zip(adjusted, rows, strict=True):
        params, counts = row.params, row.counts
        if counts is not None:
            if params.repetition_penalty != 1.0:
                scaled = torch.where(line > 0, line / params.repetition_penalty, line * params.repetition_penalty)
                line.copy_(torch.where(counts.seen, scaled, line).clamp_(-largest, largest))
            line -= params.frequency_penalty * counts.output_counts
            line -= params.presence_penalty * (counts.output_counts > 0)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=line.device)
            line[ids] += torch.tensor(list(params.logit_bias.values()), dtype=line.dtype, device=line.device)
        if row.banned:
            line[torch.tensor(list(row.banned), dtype=torch.int64, device=line.device)] = LOWEST
        if row.allowed is not None:
            line.masked_fill_(~row.allowed.to(line.device), LOWEST)
    return adjusted


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Temperature, filters and the draw. Every row has a temperature above 0."""
    device = logits.device
    scores = logits.double()
    # The largest score becomes 0 before it is divided, so that no temperature, however small, overflows it.
    scores = scores - scores.amax(dim=-1, keepdim=True)
    scores /= _column([row.params.temperature for row in rows], device)
    weights = scores.exp()
    if any(row.params.top_k or row.params.top_p < 1.0 or row.params.min_p > 0.0 for row in rows):
        weights *= _kept(scores, rows)
    cumulative = weights.cumsum(dim=-1)
    # The first token whose cumulative weight exceeds the target has a weight of its own; as u <= 1 - 2**-53,
    # the target is below the total even after rounding.
    target = cumulative[:, -1:] * _column([uniform(row.seed, row.position) for row in rows], device)
    return [int(token) for token in torch.searchsorted(cumulative, target, right=True)[:, 0].tolist()]


def _kept(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Which tokens min-p, top-k and top-p leave, [n, vocab] bool. Scores: log weights, the largest 0.

    Each filter keeps a beginning of the tokens sorted by score, so the three together are one number of tokens to keep.
    """
    vocab_size = scores.shape[1]
    min_p = _column([row.params.min_p for row in rows], scores.device)
    top_k = _column([min(row.params.top_k or vocab_size, vocab_size) for row in rows], scores.device).long()
    top_p = _column([row.params.top_p for row in rows], scores.device)

    floor = min_p.log()  # -inf where min-p is off
    above_floor = scores >= floor
    count = torch.minimum(above_floor.sum(dim=-1, keepdim=True), top_k)  # after min-p and top-k
    best = _sorted_descending(scores)
    if any(row.params.top_p < 1.0 for row in rows):
        weights = best.exp()
        cumulative = weights.cumsum(dim=-1)
        total = cumulative.gather(1, count - 1)
        # A token stays if those before it have not reached top_p yet.
        inside = (cumulative - weights < top_p * total).sum(dim=-1, keepdim=True)
        count = torch.where(top_p < 1.0, torch.minimum(inside, count), count)
    last = best.gather(1, count - 1)  # the score of the last token kept
    above, ties = scores > last, scores == last
    room = count - above.sum(dim=-1, keepdim=True)
    if bool((ties.sum(dim=-1, keepdim=True) > room).any()):
        ties &= ties.cumsum(dim=-1) <= room
    return above | ties


def _sorted_descending(scores: torch.Tensor) -> torch.Tensor:
    if scores.device.type == "cpu":  # numpy sorts with vector instructions: about a hundred times as fast as torch here
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values


def row_by_row(choose: Callable[..., list[SampledToken]]) -> Callable[..., list[SampledToken]]:
    """The same function of logits and lists of as many entries, called for one row at a time.

    Torch may take a row's sum in another order beside other rows, or at another address.
    """

    def each(logits: torch.Tensor, *columns: Sequence[Any]) -> list[SampledToken]:
        return [
            choose(row.unsqueeze(0).clone(), *([entry] for entry in entries))[0]
            for row, *entries in zip(logits.unbind(), *columns, strict=True)
        ]

    return each


def report(raw: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[SampledToken]:
    """Tokens with raw logprob, rank and the num_top likeliest ones of their row, from raw float32 logits [n, vocab]."""
    total = raw.logsumexp(dim=-1, keepdim=True)
    chosen = raw.gather(1, torch.tensor(tokens, dtype=torch.int64, device=raw.device).unsqueeze(1))
    logprobs = (chosen - total)[:, 0].tolist()
    ranks = ((raw > chosen).sum(dim=-1) + 1).tolist()
    most = min(max(num_top), raw.shape[1])
    lowest = raw.topk(max(most, 1), dim=-1).values
    result = []
    for i, (token, k) in enumerate(zip(tokens, num_top, strict=True)):
        top: list[tuple[TokenId, float]] = []
        if k:
            # All tokens that tie with the k-th, so that lowest id comes first among equals.
            ids = (raw[i] >= lowest[i, min(k, most) - 1]).nonzero()[:, 0]
            pairs = zip(ids.tolist(), (raw[i, ids] - total[i]).tolist(), strict=True)
            top = [(TokenId(t), p) for t, p in sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:k]]
        result.append(SampledToken(TokenId(token), logprobs[i], ranks[i], tuple(top)))
    return result


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)
