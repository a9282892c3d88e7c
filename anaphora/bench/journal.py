"""The state file: every finished trial, one JSON line each, so that a killed run goes on where it stopped.

Knows files and the shape of a trial; must not know what is measured. The first line says which plan the trials belong
to. A line that was cut short by the kill is dropped: its trial runs again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anaphora.bench.measurement import Wave
from anaphora.bench.trial import Trial
from anaphora.errors import BenchError

_FORMAT = 1


class Journal:
    """Trials in order of completion. `path` None keeps them in memory only.

    num_resumed: trials that were in the file already. Raises BenchError if the file is of another plan or unreadable.
    """

    def __init__(self, path: Path | None, plan: Mapping[str, Any]) -> None:
        self._path = path
        self.trials: list[Trial] = []
        header = json.dumps({"format": _FORMAT, "plan": plan}, sort_keys=True)
        if path is None:
            return
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
            if lines[0] and json.loads(lines[0]) != json.loads(header):
                raise BenchError(
                    f"{path} belongs to a run with other options: give --fresh to begin anew, or another --state"
                )
            whole = lines[:-1]  # what follows the last line end was cut short
            self.trials = [_trial(json.loads(line)) for line in whole[1:]]
            kept = b"".join(line + b"\n" for line in whole) or header.encode() + b"\n"
            path.write_bytes(kept)
        except OSError as error:
            raise BenchError(f"the state file {path} cannot be used: {error}; give another --state") from error
        except (ValueError, LookupError, TypeError) as error:
            raise BenchError(f"{path} is no state file of this benchmark ({error}): give another --state") from error

    @property
    def done(self) -> set[tuple[str, int, str]]:
        """(case, trial, target) of what need not run again."""
        return {(trial.case, trial.trial, trial.target) for trial in self.trials}

    def add(self, trial: Trial) -> None:
        """On disk when this returns. Raises BenchError."""
        self.trials.append(trial)
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BenchError(f"the state file {self._path} cannot be written: {error}") from error

    def remove(self) -> None:
        """The run is over and reported: the next one begins anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _trial(document: Mapping[str, Any]) -> Trial:
    waves = tuple(Wave.from_json(wave) for wave in document["waves"])
    return Trial(document["case"], document["trial"], document["target"], waves, document["not_run"])
