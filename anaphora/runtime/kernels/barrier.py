"""Where the threads of one step meet. Knows atomic memory and the system's scheduler; knows nothing of the work.

A thread that waits spins for a short while, which is all it takes when every thread has a core of its own, and then
gives its core away again and again, so that a busy neighbour, or another thread of the step, goes on.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.vectors import I32, I64

SPINS = 4000
"""Looks at the memory before the core is given away: some tens of microseconds."""

COUNT, GENERATION, ABANDONED = 0, 8, 16
"""Places in a barrier's memory of three int64, zero at first, 8 apart so that each has a cache line of its own."""

BARRIER_SIZE = 24

CLAIMS_SIZE = 24
"""Of the memory of `claim`: three counters, zero at first, 8 apart as well."""


@intrinsic
def _add(tc, address, value):
    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _load(tc, address):
    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8, typ=I64)

    return types.int64(types.int64), generate


@intrinsic
def _store(tc, address, value):
    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _give_way(tc):
    """The C library's sched_yield."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@kernel
def meet(barrier, num_threads):
    """Wait until `num_threads` threads are here. barrier: the address of BARRIER_SIZE int64.

    Returns False if the others will never come, as one of them was lost before it began.
    """
    if num_threads == 1:
        return True
    generation = _load(barrier + 8 * GENERATION)
    if _add(barrier + 8 * COUNT, 1) == num_threads - 1:
        _store(barrier + 8 * COUNT, 0)
        _store(barrier + 8 * GENERATION, generation + 1)
        return True
    spins = 0
    while _load(barrier + 8 * GENERATION) == generation:
        spins += 1
        if spins > SPINS:
            if _load(barrier + 8 * ABANDONED) != 0:
                return False
            _give_way()
    return True


@kernel
def claim(claims, turn):
    """The first number, from 0 on, that no thread has got in this turn.

    claims: the address of CLAIMS_SIZE int64. turn: counts the threads' meetings; `begin_turn` comes first.
    """
    return _add(claims + 64 * (turn % 3), 1)


@kernel
def begin_turn(claims, turn):
    """By every thread, before its first claim: makes ready the next turn's counter, which nobody reads yet."""
    _store(claims + 64 * ((turn + 1) % 3), 0)
