"""Claims: what a failed plan was to release is released by the next one; a long output takes one state slot."""

from __future__ import annotations

from anaphora import SamplingParams
from anaphora.core import CacheManager, Request, SampledToken, Scheduler, StepResult
from anaphora.core.checkpoints import Checkpoints
from anaphora.core.ids import Lineage, TokenId


def test_what_a_failed_plan_was_to_release_is_released_by_the_next_one() -> None:
    scheduler = Scheduler(CacheManager(num_blocks=16, block_size=4))
    for name in ("a", "b", "c"):
        scheduler.add(Request(name, [1, 2, 3], SamplingParams(max_tokens=1)))
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.released == {"a": (), "b": ("a",), "c": ("a", "b")}[name]
        if name == "b":
            scheduler.fail(plan, "it raised before it released anything")
        else:
            scheduler.update(plan, StepResult({plan.scheduled[0].request_id: SampledToken(TokenId(7))}))


def test_with_no_slot_free_an_output_saves_over_its_own_last_checkpoint() -> None:
    checkpoints = Checkpoints(num_slots=2, interval=512, block_size=4)
    request = Request("a", [1] * 8, SamplingParams())
    request.tokens.extend([1] * 24)
    slots = []
    for number, num_tokens in enumerate((4, 12, 16, 20), start=1):  # the prompt's last boundary, then its output's
        slots.append(checkpoints.stage(request, num_tokens, Lineage(number)))
        checkpoints.commit(Lineage(number))
    assert slots == [0, 1, 1, 1]
    assert checkpoints.longest([Lineage(1)], 1) == 1  # the prompt's own is still there
