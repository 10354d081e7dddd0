"""Prefix-aware routing: sends requests with a common prefix to the replica that has it in its prefix cache.

`PrefixRouter` stores the replicas that had requests with a hash (body_hashes.py). The next turn of a chat repeats the
previous body up to the end of the messages. Ray's own PrefixCacheAffinityRouter (ray.serve.llm) needs the prompt as an
argument of a deployment, so it needs an ingress deployment between proxy and replicas, and it waits for an actor.
"""

from collections import Counter, OrderedDict
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

MOST_HASHES = 50_000  # that a router remembers, the latest


class HashTable:
    """The replicas that had requests with a hash, for the latest `MOST_HASHES` hashes."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, set[ReplicaID]] = OrderedDict()

    def add(self, found: list[str], replica: ReplicaID) -> None:
        for one in found:
            self._replicas.setdefault(one, set()).add(replica)
            self._replicas.move_to_end(one)
        while len(self._replicas) > MOST_HASHES:
            self._replicas.popitem(last=False)

    def longest(self, found: list[str], among: set[ReplicaID]) -> set[ReplicaID]:
        """The replicas `among` the given ones with the longest common prefix; none if no replica has any."""
        for one in reversed(found):
            if having := self._replicas.get(one, set()) & among:
                return having
        return set()


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Prefers the replicas with the longest beginning of a request, unless they are overloaded: unless they have over
    `tolerance` requests of this proxy more than the least loaded one. Otherwise it chooses as Ray's default router."""

    def initialize_state(self, tolerance: int) -> None:
        self._tolerance = tolerance
        self._table = HashTable()
        self._loads = Counter[ReplicaID]()  # requests that this router has at each replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

        usual = await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidate_replicas, pending_request)
        found = self._hashes(pending_request)
        having = self._table.longest(found, {replica.replica_id for replica in candidate_replicas})
        if not having:
            return usual
        most = min(self._loads[replica.replica_id] for replica in candidate_replicas) + self._tolerance
        fit = {replica for replica in having if self._loads[replica] <= most}
        return [[replica for replica in candidate_replicas if replica.replica_id in fit], *usual]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._loads[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads -= Counter([replica_id])  # keeps counts above 0 only

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.add(self._hashes(pending_request), replica_id)

    @staticmethod
    def _hashes(request: PendingRequest | None) -> list[str]:
        return request.metadata.session_id.split(",") if request and request.metadata.session_id else []
