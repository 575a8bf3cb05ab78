"""One model's cached prefixes, for an engine of one's own: look up, fetch, store, lease."""

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from kvferry.cluster.client_deadline import Deadline
from kvferry.cluster.client_lease import RELEASE_TIMEOUT_S, Lease, acquire_lease, new_call_id
from kvferry.cluster.client_staging import Staging, require_layers, require_writable
from kvferry.cluster.control_client import ControlClient
from kvferry.proto.errors import KvferryError, NotFoundError, TransferError
from kvferry.proto.extra_keys import NO_KEYS, RequestKeys
from kvferry.proto.group_specs import specs_of, takes_partial_loads
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.identity import Identity
from kvferry.proto.ids import BlockHash, GroupId, InstanceId, LeaseId
from kvferry.proto.messages import Forgotten, Holder, Locate, Located, ResetIdentity
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import Source
from kvferry.worker.group_load import group_load
from kvferry.worker.layout_pull import pull_loads
from kvferry.worker.pull import BlockRun
from kvferry.worker.transfer_client import TransferClient

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The longest cached prefix, in tokens and in full blocks, and who holds it (None: a miss).

    Blocks are hash blocks. The prefix is usable for every group of layers: of a group with a window
    or a chunk, its end is held.
    """

    num_tokens: int
    num_blocks: int
    source: Source | None


class ModelCache:
    """The cached prefixes of one identity; made by `Ferry.model`. Thread-safe.

    A prefix is looked up, fetched and stored for all layers together. Where groups of layers have a
    window or a chunk, only that part of those layers moves that the token after the prefix can
    still attend to: it is all an engine needs, and all it may still have itself.

    A block is a hash block everywhere here, of `block_tokens` tokens. Instances with larger blocks
    serve whole ones of theirs, and take no stores.

    `token_ids` may be any sequence of integers, numpy and torch ones included; `keys` names what
    else the content depends on. Every method raises TokenError for tokens that cannot be hashed,
    BadInputError for wrong `keys` or more than 262,144 blocks, and UnavailableError or
    DeadlineError when the coordinator does not answer.
    """

    def __init__(
        self,
        control: ControlClient,
        transfer: TransferClient,
        scheme: HashScheme,
        identity: Identity,
    ) -> None:
        self.identity = identity
        self.block_tokens = scheme.hash_block_tokens
        self._scheme = scheme
        self._digest = identity.digest()
        self._control = control
        self._transfer = transfer

    def lookup(self, token_ids: object, keys: RequestKeys = NO_KEYS) -> Hit:
        """Return the longest prefix any instance holds. Changes nothing; the answer is a hint.

        Only full blocks count, the last one included: whoever needs logits computes at least the
        last token anew.
        """
        holders = self._holders(self._hashes(token_ids, keys), self._control.timeout_s)
        if not holders or not holders[0].num_hashes:
            return Hit(num_tokens=0, num_blocks=0, source=None)
        best = holders[0]
        return Hit(
            num_tokens=best.num_hashes * self.block_tokens,
            num_blocks=best.num_hashes,
            source=best.source,
        )

    def lease(self, token_ids: object, ttl_s: float, keys: RequestKeys = NO_KEYS) -> Lease:
        """Keep the longest cached prefix in place for `ttl_s` seconds; use it with `with`.

        Raises:
            BadInputError: `ttl_s` is not a positive number.
        """
        return self._lease(self._hashes(token_ids, keys), ttl_s, self._control.timeout_s)

    def fetch(
        self,
        token_ids: object,
        into: Sequence[torch.Tensor],
        keys: RequestKeys = NO_KEYS,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Copy the longest cached prefix into the front of `into`; return its number of tokens.

        Every block is verified before it is written, and only whole blocks are. What lies behind
        the prefix is untouched, and in layers with a window or a chunk also what the token after
        the prefix cannot attend to: who needs the logits of the last token fetches
        `token_ids[:-1]`.

        Of a holder that fails, others that hold as much are asked while time is left; the log
        says why. What nobody gave shortens the prefix: with several groups of layers, or a window
        or a chunk, to nothing, so that 0 comes back although blocks were written. Nor does what was
        fetched count unless the coordinator says at the end that no reset came in between.

        Args:
            token_ids: the prompt.
            into: per layer [2, num_tokens, num_kv_heads, head_size] with room for the prompt's
                full blocks; views are fine.
            keys: what else the content depends on.
            timeout_s: deadline of the whole fetch in seconds, at most 300; None takes the
                connection's.

        Raises:
            BadInputError: `into` has a wrong number of layers, shape or dtype, or cannot be written
                to; or `timeout_s` is out of range.
        """
        deadline = Deadline(self._control.timeout_s if timeout_s is None else timeout_s)
        hashes = self._hashes(token_ids, keys)
        require_layers(into, self.identity, num_tokens=self._num_tokens(hashes), who="into")
        require_writable(into, who="into")
        if not hashes:
            return 0
        with self._lease_until(deadline, hashes) as lease:
            wanted = hashes[: lease.num_blocks]
            num_tokens = self._pull(lease, wanted, into, deadline)
            failed = lease.source
        if failed is None or num_tokens == self._num_tokens(wanted):
            return num_tokens
        for source in self._others(wanted, failed, deadline):
            num_tokens = max(num_tokens, self._pull_again(source, wanted, into, deadline))
            if num_tokens == self._num_tokens(wanted):
                break
        return num_tokens

    def _others(
        self, hashes: tuple[BlockHash, ...], failed: Source, deadline: Deadline
    ) -> list[Source]:
        """Return who else holds all of the blocks, as far as there is time to ask."""
        if not deadline.left_s():
            return []
        holders = self._holders(hashes, deadline.left_s())
        return [
            one.source
            for one in holders
            if one.num_hashes == len(hashes) and one.source.instance_id != failed.instance_id
        ]

    def _pull_again(
        self,
        source: Source,
        hashes: Sequence[BlockHash],
        into: Sequence[torch.Tensor],
        deadline: Deadline,
    ) -> int:
        """Pull from another holder; the bytes of a hash are the same everywhere."""
        try:
            with self._lease_until(deadline, hashes, source.instance_id) as lease:
                return self._pull(lease, hashes[: lease.num_blocks], into, deadline)
        except KvferryError as error:
            _log.warning("%s gave nothing either: %s", source.instance_id, error)
            return 0

    def store(
        self,
        token_ids: object,
        layers: Sequence[torch.Tensor],
        keys: RequestKeys = NO_KEYS,
        *,
        instance_id: str | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Make the KV of the full blocks of `token_ids` findable; return the tokens held then.

        The prefix that the receiving instance holds is not sent again, and nothing is sent when
        somebody holds it whole. Stores are preferred, then the instance with most free blocks that
        accepts. Fewer tokens than the full blocks' come back when the transfer ended early.

        A layer with a window or a chunk is read and stored only where the token after the prefix
        still attends to: what was fetched can be stored again. A shorter prefix of the same tokens
        is findable only if it is stored by itself.

        Args:
            token_ids: the tokens whose KV `layers` holds, from the first on.
            layers: per layer [2, num_tokens, num_kv_heads, head_size].
            keys: what else the content depends on.
            instance_id: the instance that shall hold it; None lets the client choose.
            timeout_s: deadline of the whole store in seconds, at most 300; None takes the
                connection's.

        Raises:
            BadInputError: `layers` has a wrong number of layers, shape or dtype, or no bytes; or
                `timeout_s` is out of range.
            NotFoundError: no such instance of this identity, or none at all.
            BusyError, MismatchError ...: no instance took a block; the preferred one's refusal.
        """
        deadline = Deadline(self._control.timeout_s if timeout_s is None else timeout_s)
        hashes = self._hashes(token_ids, keys)
        require_layers(layers, self.identity, num_tokens=self._num_tokens(hashes), who="layers")
        if not hashes:
            return 0
        holders = self._holders(hashes, deadline.left_s())
        if instance_id is None and any(one.num_hashes == len(hashes) for one in holders):
            return self._num_tokens(hashes)
        refusal: KvferryError | None = None
        for source in _takers(holders, instance_id):
            try:
                return self.block_tokens * self._push(source, hashes, layers, deadline)
            except KvferryError as error:
                refusal = refusal or error
        raise refusal or NotFoundError(
            "no such live instance of this identity",
            given=instance_id or f"any instance of {self.identity.model}",
            allowed=[holder.source.instance_id for holder in holders],
        )

    def reset(self) -> int:
        """Let nothing be found again that stores hold of this identity; return how many blocks.

        What is being stored, taken or fetched from them now comes to nothing. Instances that
        compute keep what they have. What somebody computed before and stores after it is not known
        to be old: for other weights, use an identity of their own.
        """
        command = ResetIdentity(call_id=new_call_id(), identity_digest=self._digest)
        return self._control.ask(command, Forgotten).num_blocks

    def _pull(
        self,
        lease: Lease,
        hashes: Sequence[BlockHash],
        into: Sequence[torch.Tensor],
        deadline: Deadline,
    ) -> int:
        """Return the tokens that are in place, 0 if the lease has not lasted: they may be old."""
        num_tokens = self._pull_groups(lease, hashes, into, deadline)
        return num_tokens if num_tokens and lease.has_lasted() else 0

    def _pull_groups(
        self,
        lease: Lease,
        hashes: Sequence[BlockHash],
        into: Sequence[torch.Tensor],
        deadline: Deadline,
    ) -> int:
        if lease.source is None:
            return 0
        num_blocks, staging = len(hashes), self._staging(len(hashes))
        for group_id, group in enumerate(self.identity.groups):
            placed = group.first_needed_block(num_blocks, self.block_tokens)
            while placed < num_blocks:
                load = group_load(
                    hashes,
                    GroupId(group_id),
                    staging.block_ids(min(num_blocks - placed, staging.num_blocks)),
                    first_block=placed,
                    block_tokens=self.block_tokens,
                    source_block_tokens=lease.source.layout.virtual_block_tokens,
                    hash_block_tokens=self.block_tokens,
                )
                outcome = pull_loads(
                    self._transfer,
                    staging.memory,
                    lease.source,
                    [load],
                    lease_id=lease.lease_id or LeaseId(""),
                    timeout_s=deadline.left_s(),
                    cancel=threading.Event(),
                )
                (arrived,) = outcome.num_blocks_of_run
                staging.empty(into, group, placed, arrived)
                placed += arrived
                if outcome.error is not None:
                    _log.warning("a fetch ended after %d blocks: %s", placed, outcome.error)
                    specs = specs_of(self.identity, self.block_tokens)
                    return placed * self.block_tokens if takes_partial_loads(specs) else 0
        return num_blocks * self.block_tokens

    def _push(
        self,
        target: Source,
        hashes: Sequence[BlockHash],
        layers: Sequence[torch.Tensor],
        deadline: Deadline,
    ) -> int:
        """Return the number of blocks `target` holds; raise if it took none of what it lacks."""
        staging = self._staging(len(hashes))
        # What is there stays leased, or the end of a long prefix could push out its beginning.
        with ExitStack() as leases:

            def keep() -> int:
                lease = self._lease_until(deadline, hashes, target.instance_id)
                return leases.enter_context(lease).num_blocks

            num_before = num_held = keep()
            try:
                for group_id, group in enumerate(self.identity.groups):
                    first = group.first_needed_block(len(hashes), self.block_tokens)
                    sent = max(first, num_before)
                    while sent < len(hashes):
                        part = hashes[sent : sent + staging.num_blocks]
                        staging.fill(layers, group, sent, len(part))
                        self._transfer.store(
                            target.rank_addresses[0],
                            BlockRun(
                                group_id=GroupId(group_id),
                                hashes=part,
                                block_ids=staging.block_ids(len(part)),
                            ),
                            identity=self.identity,
                            memory=staging.memory,
                            timeout_s=deadline.left_s(),
                        )
                        num_held = keep()
                        sent = max(sent + len(part), num_held)
                if num_held < len(hashes):
                    raise TransferError(
                        "stored blocks left their place at once", given=target.instance_id
                    )
            except KvferryError as error:
                if num_held == num_before:
                    raise
                _log.warning("a store ended after %d blocks: %s", num_held, error)
        return num_held

    def _staging(self, num_blocks: int) -> Staging:
        return Staging(self.identity, block_tokens=self.block_tokens, num_blocks=num_blocks)

    def _hashes(self, token_ids: object, keys: RequestKeys) -> tuple[BlockHash, ...]:
        return hash_tokens(self._scheme, token_ids, keys)

    def _num_tokens(self, hashes: Sequence[BlockHash]) -> int:
        return len(hashes) * self.block_tokens

    def _holders(self, hashes: tuple[BlockHash, ...], timeout_s: float) -> tuple[Holder, ...]:
        command = Locate(identity_digest=self._digest, hashes=hashes)
        return self._control.ask(command, Located, timeout_s).holders

    def _lease_until(
        self,
        deadline: Deadline,
        hashes: Sequence[BlockHash],
        instance_id: InstanceId | None = None,
    ) -> Lease:
        """Keep a prefix for as long as a call may take; giving it back comes after the deadline."""
        left_s = deadline.require_s()
        return self._lease(hashes, left_s + RELEASE_TIMEOUT_S, left_s, instance_id)

    def _lease(
        self,
        hashes: Sequence[BlockHash],
        ttl_s: float,
        timeout_s: float,
        instance_id: InstanceId | None = None,
    ) -> Lease:
        return acquire_lease(
            self._control,
            self._digest,
            hashes,
            block_tokens=self.block_tokens,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            instance_id=instance_id,
        )


def _takers(holders: Sequence[Holder], instance_id: str | None) -> list[Source]:
    if instance_id is not None:
        return [one.source for one in holders if one.source.instance_id == instance_id]
    best_first = sorted(
        holders, key=lambda one: (one.role != "store", -one.num_hashes, -one.num_free_blocks)
    )
    return [one.source for one in best_first]
