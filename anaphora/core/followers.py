"""Requests that wait for another one, which computes the beginning that they share.

Knows who waits for whom and until when; must not know why.
"""

from __future__ import annotations

from anaphora.core.ids import RequestId
from anaphora.core.request import Request


class Followers:
    """leader -> its followers, each with the number of leading blocks that it shares with the leader."""

    def __init__(self) -> None:
        self._by_leader: dict[RequestId, list[tuple[int, Request]]] = {}
        self._leader_of: dict[RequestId, RequestId] = {}

    def __len__(self) -> int:
        return len(self._leader_of)

    def add(self, request: Request, leader: Request, num_shared_blocks: int) -> None:
        self._by_leader.setdefault(leader.request_id, []).append((num_shared_blocks, request))
        self._leader_of[request.request_id] = leader.request_id

    def release(self, leader: Request, num_blocks: int) -> list[Request]:
        """Take out those for whom the leader's first num_blocks blocks are all that they wait for."""
        waiting = self._by_leader.get(leader.request_id)
        if waiting is None:
            return []
        released = [request for shared, request in waiting if shared <= num_blocks]
        if released:
            self._keep(leader.request_id, [entry for entry in waiting if entry[0] > num_blocks])
            for request in released:
                del self._leader_of[request.request_id]
        return released

    def release_all(self, leader: Request) -> list[Request]:
        """Take out every follower: the leader runs no longer."""
        released = [request for _, request in self._by_leader.pop(leader.request_id, ())]
        for request in released:
            del self._leader_of[request.request_id]
        return released

    def discard(self, request: Request) -> None:
        """Take out one follower: it has ended."""
        leader_id = self._leader_of.pop(request.request_id)
        self._keep(leader_id, [entry for entry in self._by_leader[leader_id] if entry[1] is not request])

    def _keep(self, leader_id: RequestId, entries: list[tuple[int, Request]]) -> None:
        if entries:
            self._by_leader[leader_id] = entries
        else:
            del self._by_leader[leader_id]
