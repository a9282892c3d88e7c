"""Plain words: what the figures show, what they do not, and what to doubt. Knows rows and comparisons, no trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anaphora.bench.intervals import WANTED_CONFIDENCE, has_percentile

_WORDS = {"ttft_s": "time to first token", "output_tokens_per_s": "output throughput"}

NOT_SHOWN = (
    "Not shown: other machines, models or loads; arrival over time (all requests of a wave are sent at once); natural "
    "text (prompts are random tokens); whether the outputs are right."
)


def statements(document: Mapping[str, Any]) -> list[str]:
    """One sentence or two each, the sample first."""
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    return [
        *_sample(document),
        *_hits(rows),
        *_comparisons(document["comparisons"]),
        *_counter_examples(document["counter_examples"]),
        *_doubts(rows),
        *_not_run(document["not_run"]),
        NOT_SHOWN,
    ]


def _sample(document: Mapping[str, Any]) -> Iterator[str]:
    rows = document["rows"]
    if not rows:
        yield "Nothing was measured."
        return
    trials = [row["num_trials"] for row in rows]
    count = f"{min(trials)}" if min(trials) == max(trials) else f"{min(trials)} to {max(trials)}"
    noun = "trial" if max(trials) == 1 else "trials"
    total = sum(row["num_requests"] for row in rows)
    targets = len({row["target"] for row in rows})
    in_turn = ", the targets in turn within each" if targets > 1 else ""
    yield f"Sample: {count} {noun} of each case{in_turn}; {total:,} measured requests in all."
    if min(trials) < 6:
        yield (
            f"Fewer than 6 trials cannot place a median with {WANTED_CONFIDENCE:.0%} confidence: their intervals are "
            "least and most, with the confidence that so few give."
        )
    if document["num_resumed_trials"]:
        yield (
            f"Trials from an earlier start of this run: {document['num_resumed_trials']}. Its engines and its moment "
            "were others."
        )
    if document["is_cut_short"]:
        yield "The time budget ended the run before all rounds were done."


def _hits(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        ratio = row.get("cold_over_hit")
        if ratio is None or row["output_tokens"] != 1 or row["kind"] != "sweep" or row["caching"] is False:
            continue
        sizes = f"{row['prefix_tokens']:,} shared + {row['suffix_tokens']} new, {row['concurrency']} at once"
        others = ", after other prompts" if row["interference"] else ""
        text = f"{row['target']}, {sizes}{others}: the first TTFT is {_interval(ratio)} times that of the next ones"
        if row["hit_rate"] is not None:
            text += f", of whose prompts {row['hit_rate']:.0%} came from the cache"
        if row["hit_efficiency"] is not None:
            text += f"; a hit costs {_interval(row['hit_efficiency'])} times a cold prompt as long as the suffix"
        yield text + "."


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    undecided: Counter[tuple[str, str]] = Counter()
    for entry in comparisons:
        ratio, what = entry["ratio"], f"{entry['case']}, {entry['phase']}"
        figure, names = _WORDS[entry["figure"]], (entry["target"], entry["reference"])
        if ratio["confidence"] >= WANTED_CONFIDENCE and not ratio["low"] <= 1 <= ratio["high"]:
            yield f"{what}: {names[0]}'s {figure} is {_interval(ratio)} times {names[1]}'s, pair by pair."
        else:
            undecided[names] += 1
    for (target, reference), count in undecided.items():
        total = sum((entry["target"], entry["reference"]) == (target, reference) for entry in comparisons)
        yield (
            f"{target} against {reference}: no difference is shown in {count} of {total} comparisons: the interval "
            "of the ratio holds 1, or the pairs are fewer than 6."
        )


def _counter_examples(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    guarded = {entry["target"]: entry["holds"] for entry in entries if entry["expected"] == "hit"}
    for entry in entries:
        what = f"{entry['target']}, {entry['kind']}"
        if entry["not_run"] is not None:
            continue
        if not entry["cached_tokens"] or entry["holds"] is None:
            yield f"{what}: unknown, as the target does not report cached tokens."
        elif entry["holds"] and entry["expected"] == 0 and guarded.get(entry["target"]) is not True:
            yield f"{what}: 0 cached tokens, which proves nothing, as an exact repeat had none either."
        elif entry["holds"]:
            found = "a hit" if entry["expected"] == "hit" else "0 cached tokens"
            yield f"{what}: {found}, as it must be ({len(entry['cached_tokens'])} times)."
        else:
            yield f"{what}: WRONG: expected {entry['expected']}, cached tokens were {_counts(entry['cached_tokens'])}."


def _doubts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    stale = [row for row in rows if row["phase"] == "first" and row["concurrency"] == 1 and row["cached_tokens"]]
    for row in stale:
        yield (
            f"{row['target']}, {row['case']}: cold requests were not cold ({row['cached_tokens']:,} cached tokens): it "
            "holds an earlier run's prompts; restart it or give another --seed."
        )
    for target in dict.fromkeys(row["target"] for row in rows if row["cached_tokens"] is None):
        yield f"{target} does not report cached tokens: that a request hit follows from its time alone."
    measured = [row for row in rows if row["ttft_s"] is not None]
    few = [row for row in measured if not has_percentile(row["ttft_s"]["num_values"], 95)]
    if few:
        yield (
            f"P95 of fewer than 20 values and P99 of fewer than 100 are their largest value: so it is with P95 of TTFT "
            f"in {len(few)} of {len(measured)} rows."
        )
    if measured:
        worst = max(measured, key=_spread)
        yield (
            f"Spread: TTFT's most is up to {_spread(worst):.1f} times its least within a row ({worst['target']}, "
            f"{worst['case']}, {worst['phase']}); rank nothing on a smaller gap than the intervals show."
        )


def _not_run(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for reason, target in dict.fromkeys((entry["reason"], entry["target"]) for entry in entries):
        mine = [entry["case"] for entry in entries if (entry["reason"], entry["target"]) == (reason, target)]
        yield f"Not run on {target}: {', '.join(mine)}: {reason}."


def _spread(row: Mapping[str, Any]) -> float:
    least: float = row["ttft_s"]["least"]
    most: float = row["ttft_s"]["most"]
    return most / least if least > 0 else 1.0


def _interval(interval: Mapping[str, Any]) -> str:
    if interval["num_values"] == 1:
        return f"{interval['median']:.2f} (one trial)"
    return f"{interval['median']:.2f} [{interval['low']:.2f} – {interval['high']:.2f}, {interval['confidence']:.0%}]"


def _counts(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
