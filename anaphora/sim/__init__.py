"""The control plane replays traces without a model: the same core, a simulated executor, a virtual clock."""

from anaphora.sim.chain import TraceChain
from anaphora.sim.sequential import SequentialResult, replay_sequential
from anaphora.sim.trace import Trace, TraceRequest

__all__ = ["SequentialResult", "Trace", "TraceChain", "TraceRequest", "replay_sequential"]
