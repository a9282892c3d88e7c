"""The tests can fail: each mutant of the control plane turns the test that is named beside it red.

A mutant is a fresh copy of the sources with some lines changed, run in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "anaphora"

RUNNER = """
import importlib, sys
import anaphora.core
assert anaphora.core.__file__.startswith(sys.argv[1]), "not the copy"
for test in sys.argv[2:]:
    module, name = test.split("::")
    function = getattr(importlib.import_module(module), name)
    try:
        function()
    except AssertionError:
        print("red")
    else:
        print("green")
"""


@dataclass(frozen=True)
class Mutant:
    """edits: (file in anaphora/core, text that stands there exactly once, what stands there instead)."""

    name: str
    test: str
    edits: tuple[tuple[str, str, str], ...]


MUTANTS = [
    Mutant(
        "commit before write: what a step is about to write is committed when it is planned",
        "test_sharing_within_a_step::test_pending_blocks_are_not_findable_after_a_step_that_raised",
        (
            (
                "planner.py",
                "        staged = self._cache.stage(request, stop)\n",
                "        staged = self._cache.stage(request, stop)\n        self._cache.commit(staged)\n",
            ),
        ),
    ),
    Mutant(
        "commit before write: blocks of later chunks are staged with the first one",
        "test_sharing_within_a_step::test_what_was_committed_before_a_failed_step_stays",
        (("planner.py", "self._cache.stage(request, stop)", "self._cache.stage(request, request.num_tokens)"),),
    ),
    Mutant(
        "pending entries outlive a failed step",
        "test_sharing_within_a_step::test_pending_blocks_are_not_findable_after_a_step_that_raised",
        (("scheduler.py", "            self.cache.withdraw(entry.staged)\n", "            pass\n"),),
    ),
    Mutant(
        "pending entries outlive a step that succeeded",
        "test_prefix_index::test_staged_blocks_are_pending_committed_ones_are_not_and_withdrawn_ones_are_gone",
        (("prefix_index.py", "            if pending.get(block_hash) == block:\n", "            if False:\n"),),
    ),
    Mutant(
        "the head of a table is released first",
        "test_block_pool::test_free_releases_the_tail_first_so_that_children_are_evicted_before_their_parents",
        (("block_pool.py", "        cached.reverse()\n", ""),),
    ),
    Mutant(
        "an evicted block stays in the index",
        "test_block_pool::test_an_allocated_block_is_in_no_index_before_it_is_given_out",
        (
            (
                "block_pool.py",
                "        if self._on_lost is None:\n            self.index.remove_all(blocks)\n",
                "        if self._on_lost is None:\n            pass\n",
            ),
        ),
    ),
    Mutant(
        "an evicted block stays in the index, seen by who reads it",
        "test_sharing_within_a_step::test_a_failed_step_that_evicted_leaves_no_stale_entry",
        (
            (
                "block_pool.py",
                "        if self._on_lost is None:\n            self.index.remove_all(blocks)\n",
                "        if self._on_lost is None:\n            pass\n",
            ),
        ),
    ),
    Mutant(
        "a hit may cover every token",
        "test_scheduler::test_repeating_a_prompt_of_whole_blocks_computes_its_last_block_again_and_leaves_one_copy",
        (
            (
                "finder.py",
                "if request.is_scoring else request.num_tokens - 1\n",
                "if False else request.num_tokens\n",
            ),
        ),
    ),
    Mutant(
        "a request that scores its prompt may find what others computed, once it was preempted",
        "test_preemption::test_a_preempted_request_that_scores_its_prompt_finds_only_what_it_computed_itself",
        (("finder.py", "return request.furthest_computed if", "return request.num_tokens - 1 if"),),
    ),
    Mutant(
        "the salt is dropped where the chain is made",
        "test_cache_manager::test_another_salt_finds_nothing_and_the_same_salt_finds_all",
        (("finder.py", "chains.make(request.tokens, request.extra_keys)", "chains.make(request.tokens, ())"),),
    ),
    Mutant(
        "the salt does not enter the content of its block",
        "test_sharing_within_a_step::test_salts_are_not_shared_within_a_step",
        (("hashing.py", "            contents[index - first] += self.extra_keys[index]\n", "            pass\n"),),
    ),
    Mutant(
        "a known chain is copied whatever its extra keys",
        "test_chain_memo::test_filling_is_hashing",
        (("chain_memo.py", "        if keyed is not None:\n", "        if False:\n"),),
    ),
    Mutant(
        "the ref count is not raised when a block is found",
        "test_cache_manager::test_admit_gives_the_blocks_of_the_hit_and_new_ones_for_every_other_known_token",
        (("block_pool.py", "            ref_counts[block] += 1\n", "            pass\n"),),
    ),
    Mutant(
        "a found block stays in the free queue",
        "test_block_pool::test_touch_takes_found_blocks_out_of_the_queue_and_the_last_owner_puts_them_back",
        (("block_pool.py", "            self.free_queue.cached.remove(free)\n", "            pass\n"),),
    ),
    Mutant(
        "tokens are not confirmed on a hit",
        "test_prefix_index::test_a_block_whose_hash_collides_is_not_found_and_counted",
        (
            ("block_contents.py", "            and get(self.contents)[:-1] == tuple(contents)\n", ""),
            ("block_contents.py", " or self.contents[block] != content", ""),
            ("block_contents.py", " or contents[block] != chain.contents[index]", ""),
        ),
    ),
    Mutant(
        "tokens are not confirmed where a second block comes to have the same hash",
        "test_prefix_index::test_a_block_whose_hash_collides_is_not_found_and_counted",
        (
            (
                "prefix_index.py",
                "            elif parents[twin] == parent and all_contents[twin] == content:\n",
                "            elif parents[twin] == parent:\n",
            ),
        ),
    ),
    Mutant(
        "a copy is not pending: its first copy may be evicted within the step, and the next one is a stranger to it",
        "test_prefix_index::test_a_copy_staged_in_the_step_that_evicts_the_first_one_hands_its_lineage_on",
        (
            (
                "prefix_index.py",
                "                lineage = lineages[twin]\n                pending.setdefault(block_hash, block)",
                "                lineage = lineages[twin]\n                pass",
            ),
        ),
    ),
    Mutant(
        "the parent is not confirmed on a hit",
        "test_prefix_index::test_the_parent_is_confirmed_even_where_a_block_of_the_same_content_and_hash_has_another_one",
        (
            (
                "block_contents.py",
                "            parents[0] == parent\n"
                "            and parents[1:-1] == get(self.lineages)[:-2]\n"
                "            and get(self.contents)",
                "            get(self.contents)",
            ),
            ("block_contents.py", "self.parents[block] != parent or ", ""),
            ("block_contents.py", " parents[block] != parent or ", " "),
        ),
    ),
    Mutant(
        "the parent of a pending block is not confirmed",
        "test_prefix_index::test_the_parent_of_a_pending_block_is_confirmed_too",
        (("block_contents.py", " parents[block] != parent or ", " "),),
    ),
    Mutant(
        "what was committed beside a pending block of the same name is pushed out of the index",
        "test_prefix_index::test_a_copy_that_is_committed_first_stays_when_the_one_before_it_follows",
        (("prefix_index.py", "        self._are_pending_names_new = False\n", ""),),
    ),
    Mutant(
        "a trail takes any lineages for consecutive ones",
        "test_trails::test_a_trail_of_copies_in_between_has_their_lineages",
        (("trail.py", "first == last - count + 1 and count > 1:", "last and count > 1:"),),
    ),
    Mutant(
        "two chains that have their lists in common grow together",
        "test_chain_memo::test_chains_of_the_same_blocks_have_their_lists_in_common_until_one_of_them_goes_on",
        (("hashing.py", "        if self._has_lists_in_common:\n", "        if False:\n"),),
    ),
    Mutant(
        "a trail is walked on whatever has become of its blocks",
        "test_trails::test_what_is_gone_ends_a_trail_and_names_go_on_from_there",
        (
            (
                "trail.py",
                "return len(self.blocks) if now == self._lineages else common",
                "return len(self.blocks) or common",
            ),
        ),
    ),
    Mutant(
        "a trail leads to a copy that is pending",
        "test_trails::test_a_block_that_comes_back_to_its_lineage_as_a_copy_is_pending_until_its_step_has_succeeded",
        (("prefix_index.py", "if trail is None or self._staged_copies else", "if trail is None else"),),
    ),
    Mutant(
        "a trail is left while a step is in flight",
        "test_trails::test_no_trail_leads_through_pending_blocks",
        (("finder.py", " and not self._index.num_pending:", ":"),),
    ),
    Mutant(
        "a trail is taken over by who has the same hashes",
        "test_trails::test_another_beginning_of_the_same_hashes_gets_no_trail",
        (
            (
                "chain_memo.py",
                "count = chain.common_blocks(known, len(known.trail.blocks))",
                "count = len(known.trail.blocks)",
            ),
        ),
    ),
    Mutant(
        "a writer's failure is not carried to its readers",
        "test_sharing_within_a_step::test_a_failed_writer_takes_its_readers_along_and_nobody_else",
        (
            (
                "step.py",
                "        writers = {self.pending_writer[block] for block in hit.blocks[hit.num_committed :]}\n",
                "        writers = set()\n",
            ),
        ),
    ),
    Mutant(
        "a writer's failure is carried to everyone",
        "test_sharing_within_a_step::test_a_failed_writer_takes_its_readers_along_and_nobody_else",
        (("scheduler.py", "entry.shares_with & failed.keys()", "failed.keys()"),),
    ),
    Mutant(
        "an admission may evict its own hit",
        "test_cache_manager::test_hits_that_are_free_are_charged_as_the_free_blocks_that_they_are",
        (("cache_manager.py", "num_spine = num_new + len(free)", "num_spine = num_new"),),
    ),
    Mutant(
        "a long prompt takes the whole budget from those who decode",
        "test_scheduler::test_a_running_request_of_better_rank_leaves_each_later_one_the_token_that_it_is_owed",
        (("planner.py", "step.budget - owed)", "step.budget)"),),
    ),
    Mutant(
        "what was taken away is given to someone else in the same step",
        "test_preemption::test_nobody_is_admitted_in_a_step_that_preempts",
        (("planner.py", "        if not step.preempted:", "        if True:"),),
    ),
    Mutant(
        "two free copies of a content are both kept",
        "test_block_pool::test_a_released_copy_becomes_blank_while_another_owner_keeps_the_content_findable",
        (("block_pool.py", "        if self.index.copies and cached:\n", "        if False:\n"),),
    ),
    Mutant(
        "a window is never given back",
        "test_side_groups::test_a_window_that_is_no_multiple_of_the_block_is_given_back_block_by_block",
        (("side_group.py", "        if first > table.first:\n", "        if False:\n"),),
    ),
    Mutant(
        "a block is given back that the next token still sees",
        "test_side_groups::test_a_window_that_is_no_multiple_of_the_block_is_given_back_block_by_block",
        (
            (
                "side_group.py",
                "        first = self.first_block(num_computed_tokens)\n",
                "        first = self.first_block(num_computed_tokens) + 1\n",
            ),
        ),
    ),
    Mutant(
        "a side group has no say in a hit",
        "test_hit_lengths::test_the_hit_is_the_longest_that_every_group_accepts_whatever_they_hold",
        (("hit.py", "            count = group.longest(lineages, count)\n", "            pass\n"),),
    ),
    Mutant(
        "a group is asked once, whatever the others take away",
        "test_hit_lengths::test_the_hit_is_the_longest_that_every_group_accepts_whatever_they_hold",
        (("hit.py", "    while count != before:\n", "    for _ in range(1):\n"),),
    ),
    Mutant(
        "pending side blocks outlive a failed step",
        "test_side_groups::test_a_failed_step_leaves_nothing_of_any_group",
        (
            (
                "dependents.py",
                "            self._sides.withdraw(self._lineages_of(staged.blocks), staged.sides)\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "side blocks outlive the beginning in the spine",
        "test_side_groups::test_when_the_spine_forgets_a_beginning_the_side_blocks_of_it_are_blank",
        (("dependents.py", "            self._pool.forget_sides(lineage)\n", "            pass\n"),),
    ),
    Mutant(
        "a checkpoint outlives the beginning in the spine",
        "test_checkpoints::test_the_state_goes_with_the_beginning_that_the_spine_forgets",
        (("dependents.py", "                self._checkpoints.drop(lineage)\n", "                pass\n"),),
    ),
    Mutant(
        "a writer's failure is not carried to who reads its side blocks only",
        "test_side_groups::test_a_reader_of_a_pending_side_block_fails_with_its_writer_though_the_spine_is_committed",
        (
            (
                "step.py",
                "        return writers.union(self.pending_side_writer[block] for block in hit.pending_sides)\n",
                "        return writers\n",
            ),
        ),
    ),
    Mutant(
        "two blocks of one side group and beginning are both findable",
        "test_side_groups::test_a_block_that_was_computed_again_replaces_the_one_before",
        (("block_pool.py", "            self._forget_side(group, lineage)\n", "            pass\n"),),
    ),
    Mutant(
        "an admission counts on blocks that a running request was promised",
        "test_side_groups::test_an_admission_counts_on_what_running_requests_were_promised",
        (
            (
                "cache_manager.py",
                "return self.pool.num_free - self.sides.num_owed",
                "return self.pool.num_free",
            ),
        ),
    ),
    Mutant(
        "a step may compute more than its side groups can hold",
        "test_side_groups::test_a_step_computes_no_more_than_the_side_groups_can_hold",
        (("capacity.py", "        if self._fits(num_tokens, wanted):\n", "        if True:\n"),),
    ),
    Mutant(
        "a state is found within the step that saves it",
        "test_checkpoints::test_a_state_that_rolls_for_one_stays_when_another_has_a_reason_to_keep_it",
        (("checkpoints.py", "or (with_pending and lineage in self._pending)", "or lineage in self._pending"),),
    ),
    Mutant(
        "a step runs past where a state is to be saved",
        "test_checkpoints::test_the_interval_is_rounded_up_to_whole_blocks",
        (("checkpoints.py", "if start < boundary < stop), default=stop", "if False), default=stop"),),
    ),
    Mutant(
        "every state that is saved while decoding stays",
        "test_checkpoints::test_while_decoding_only_the_latest_state_of_a_request_stays",
        (
            (
                "checkpoints.py",
                "            if before is not None:\n                self.drop(before)\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "a state rolls on although somebody used it",
        "test_checkpoints::test_a_rolling_state_that_somebody_used_stays",
        (("checkpoints.py", "        checkpoint.rolling_for = None\n", "        pass\n"),),
    ),
    Mutant(
        "no state is saved where prompts were seen to part",
        "test_checkpoints::test_a_shared_beginning_loses_less_than_an_interval_once_and_nothing_from_then_on",
        (
            (
                "cache_manager.py",
                "            dependents.part(request, hit.num_matched)\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "a leader does not stop where its follower parts from it",
        "test_checkpoints::test_whoever_shares_with_a_running_request_waits_for_a_state_exactly_where_they_part",
        (
            (
                "cache_manager.py",
                "            self._dependents.part(leader, num_blocks)\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "a failed step's state is kept",
        "test_checkpoints::test_a_failed_step_saves_nothing_and_returns_the_slot",
        (
            (
                "dependents.py",
                "            self._checkpoints.withdraw(staged.state_of)\n",
                "            self._checkpoints.commit(staged.state_of)\n",
            ),
        ),
    ),
    Mutant(
        "a salt that begins inside a block counts from the next one",
        "test_extra_keys::test_regions_add_up_and_a_salt_for_all_is_one_that_starts_at_0",
        (("hashing.py", "salt_key(salt, start // block_size)", "salt_key(salt, -(-start // block_size))"),),
    ),
    Mutant(
        "the epoch of what was forgotten does not enter the keys",
        "test_forget::test_a_salt_is_forgotten_and_the_others_are_not_as_often_as_wanted",
        (("scopes.py", "return (*keys, *stamps)", "return tuple(keys)"),),
    ),
    Mutant(
        "every forgetting gives the same epoch",
        "test_forget::test_a_salt_is_forgotten_and_the_others_are_not_as_often_as_wanted",
        (("scopes.py", "self._epochs[scope] = self.last", "self._epochs[scope] = 1"),),
    ),
    Mutant(
        "an adapter is not forgotten, only salts are",
        "test_forget::test_an_adapter_is_forgotten_under_every_salt_and_a_salt_of_its_bytes_is_not",
        (("scopes.py", "(ExtraKeyKind.SALT, ExtraKeyKind.LORA)", "(ExtraKeyKind.SALT,)"),),
    ),
    Mutant(
        "a scope that is pushed out of the table is as if it had never been forgotten",
        "test_forget::test_an_epoch_never_comes_back_however_small_the_table_is",
        (("scopes.py", "self._floors[place] = max(epoch, self._floors.get(place, 0))", "self._floors[place] = 0"),),
    ),
    Mutant(
        "a prefix is forgotten where its tokens were found, not where they are looked for",
        "test_forget::test_a_prefix_is_forgotten_with_all_that_begins_with_it_and_nothing_else",
        (("chain_maker.py", "            if cut is None:\n", "            if True:\n"),),
    ),
    Mutant(
        "a prefix that is forgotten once more keeps its first epoch",
        "test_forget::test_a_prefix_is_forgotten_with_all_that_begins_with_it_and_nothing_else",
        (("scopes.py", "self._prefixes[block_hash] = self.last", "self._prefixes.setdefault(block_hash, self.last)"),),
    ),
    Mutant(
        "who generates its way into a forgotten prefix finds it",
        "test_forget::test_who_generates_its_way_into_a_forgotten_prefix_does_not_find_it_after_a_preemption",
        (("finder.py", "limit if cut is None else cut", "limit"),),
    ),
    Mutant(
        "a prefix leaves the table although a request of before computes it still",
        "test_forget::test_a_prefix_that_a_request_of_before_may_compute_again_stays",
        (("scopes.py", " or (oldest_alive is not None and oldest_alive < epoch)", ""),),
    ),
]


def copy_of_the_sources(folder: Path) -> Path:
    """What core needs, under `folder`; returns core's folder there."""
    target = folder / "anaphora"
    shutil.copytree(PACKAGE / "core", target / "core", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("config.py", "errors.py", "pooling_params.py", "salt_regions.py", "sampling_params.py"):
        shutil.copy(PACKAGE / name, target / name)
    (target / "__init__.py").touch()
    return target / "core"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path.name} holds {old!r} {text.count(old)} times: bring the mutant up to date"
    path.write_text(text.replace(old, new), encoding="utf-8")


def outcomes(folder: Path, tests: list[str]) -> list[str]:
    """`red` or `green` for each test (module::function), run against the copy."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (folder, TESTS, TESTS / "core"))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-P", "-c", RUNNER, str(folder), *tests]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_the_code_as_it_is_passes_every_test_that_a_mutant_names(tmp_path: Path) -> None:
    copy_of_the_sources(tmp_path)
    tests = sorted({mutant.test for mutant in MUTANTS})
    assert outcomes(tmp_path, tests) == ["green"] * len(tests)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_turns_its_test_red(mutant: Mutant, tmp_path: Path) -> None:
    core = copy_of_the_sources(tmp_path)
    for file, old, new in mutant.edits:
        change(core / file, old, new)
    assert outcomes(tmp_path, [mutant.test]) == ["red"]


def test_a_mutant_whose_text_is_not_there_exactly_once_is_refused(tmp_path: Path) -> None:
    core = copy_of_the_sources(tmp_path)
    with pytest.raises(AssertionError, match="0 times: bring the mutant up to date"):
        change(core / "ids.py", "no such text", "")
    with pytest.raises(AssertionError, match=r"\d+ times: bring the mutant up to date"):
        change(core / "ids.py", "NewType", "")
