"""How idle OpenMP threads wait. Must be decided before torch is imported, so it imports nothing."""

from __future__ import annotations

import os


def let_idle_threads_sleep() -> None:
    """Set OMP_WAIT_POLICY=PASSIVE unless the user has set it.

    Idle OpenMP threads spin by default and take whole cores from everybody else, this process' other threads included:
    on two shared cores a generation took three times as long. OpenMP reads the variable once, when torch is imported;
    later calls have no effect.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
