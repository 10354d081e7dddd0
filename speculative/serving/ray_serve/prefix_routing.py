"""Prefix-aware routing: sends requests with a common prefix to the replica that has it in its prefix cache.

`PrefixRouter` stores the replicas that had requests with a hash (body_hashes.py). The next turn of a chat repeats the
previous body up to the end of the messages. Ray's own PrefixCacheAffinityRouter (ray.serve.llm) needs the prompt as an
argument of a deployment, so it needs an ingress deployment between proxy and replicas, and it waits for an actor.
"""

import re
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

from speculative.serving.ray_serve.body_hashes import CHUNK, PREFIX_BYTES

MAX_HASHES = 50_000  # a router keeps the latest ones
# what BeginningReader adds to a request
HASHES = re.compile(rf"[0-9a-f]{{16}}(,[0-9a-f]{{16}}){{0,{PREFIX_BYTES // CHUNK - 1}}}")


class HashTable:
    """The replicas that had requests with a hash, for the latest `MAX_HASHES` hashes."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, set[ReplicaID]] = OrderedDict()

    def add(self, hashes: list[str], replica: ReplicaID) -> None:
        for chunk_hash in hashes:
            self._replicas.setdefault(chunk_hash, set()).add(replica)
            self._replicas.move_to_end(chunk_hash)
        while len(self._replicas) > MAX_HASHES:
            self._replicas.popitem(last=False)

    def longest_match(self, hashes: list[str], candidates: set[ReplicaID]) -> set[ReplicaID]:
        """The replicas among `candidates` with the longest common prefix; none if no replica has any."""
        for chunk_hash in reversed(hashes):
            if matching := self._replicas.get(chunk_hash, set()) & candidates:
                return matching
        return set()


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Prefers the replicas with the longest beginning of a request, unless they are overloaded: unless they have over
    `tolerance` requests of this proxy more than the least loaded one. Otherwise it chooses as Ray's default router."""

    def initialize_state(self, tolerance: int) -> None:
        self._tolerance = tolerance
        self._hash_table = HashTable()
        self._loads = Counter[ReplicaID]()  # requests that this router has at each replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

        default = await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidate_replicas, pending_request)
        hashes = self._hashes(pending_request)
        matching = self._hash_table.longest_match(hashes, {replica.replica_id for replica in candidate_replicas})
        if not matching:
            return default
        max_load = min(self._loads[replica.replica_id] for replica in candidate_replicas) + self._tolerance
        eligible = {replica for replica in matching if self._loads[replica] <= max_load}
        return [[replica for replica in candidate_replicas if replica.replica_id in eligible], *default]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._loads[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads -= Counter([replica_id])  # keeps counts above 0 only

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._hash_table.add(self._hashes(pending_request), replica_id)

    @staticmethod
    def _hashes(request: PendingRequest | None) -> list[str]:
        session = request.metadata.session_id if request else ""
        return session.split(",") if HASHES.fullmatch(session) else []  # others are a client's own
