"""Engines outside: they save to stores, load from them, and have everything forgotten at times.

What is saved carries a stamp of its own beside what it must hold, so that a load tells which save
it was given, and nothing that was there before a reset may come after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvferry.cluster.sim.blocking import Event
from kvferry.cluster.sim.content import Values, states_of
from kvferry.cluster.sim.fetching import Served
from kvferry.cluster.sim.members import Birth, Member
from kvferry.cluster.sim.workload import tokens_of
from kvferry.proto.errors import InvariantError, KvferryError
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.hashing import hash_tokens
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId
from kvferry.proto.messages import (
    AcquireLease,
    Command,
    Done,
    Forgotten,
    Leased,
    ReleaseLease,
    Reply,
    ResetIdentity,
    expect,
)
from kvferry.proto.step_messages import Source
from kvferry.worker.group_load import group_load
from kvferry.worker.take_wire import make_take_ask

NO_KEYS = RequestKeys()
CALL_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 5.0
SHORT_SAVE_S = 0.03
"""Who has waited so long for a save may write something else, whoever still reads."""

LEASE_S = 10.0
RESET = 0.04


@dataclass(slots=True)
class Saves:
    """When each save ended, by its stamp, and when the last reset began and ended."""

    ended_s: dict[int, float] = field(default_factory=dict)
    num_begun: int = 0
    reset_begun_s: float = -1.0
    num_loaded_blocks: int = 0
    num_resets: int = 0

    def begin(self) -> int:
        """Return the stamp of a new save."""
        self.num_begun += 1
        return self.num_begun

    def require_current(self, stamp: int, reset_begun_s: float) -> None:
        """Refuse what a save had brought before a reset that was over when a load began.

        Raises:
            InvariantError: it is from before.
        """
        ended_s = self.ended_s.get(stamp)
        if ended_s is not None and ended_s < reset_begun_s:
            raise InvariantError(
                f"what save {stamp} had stored was loaded after a reset",
                given=f"saved until {ended_s:.3f} s",
                allowed=f"after {reset_begun_s:.3f} s",
            )


class Client(Member):
    """One engine outside: it is no member, but others fetch from its worker.

    Args:
        birth: as `Member`.
        stores: returns those that live.
        prompts: what clients save and load.
        saves: of all clients.
        pause_s: between two things that it does, about.
    """

    def __init__(
        self,
        birth: Birth,
        *,
        stores: Callable[[], list[Served]],
        prompts: Sequence[tuple[int, ...]],
        saves: Saves,
        pause_s: float,
    ) -> None:
        super().__init__(birth)
        self.is_over = False
        self._stores = stores
        self._prompts = prompts
        self._saves = saves
        self._pause_s = pause_s
        self._num_calls = 0
        self._layers: list[Values] = [layer.numpy() for layer in self.worker.memory.layers]

    def join(self) -> None:
        """Save, load and reset until it is over."""
        random = self.network.world.random
        while not self.is_over:
            self.network.world.sleep(random.expovariate(1.0 / self._pause_s))
            prompt = random.choice(self._prompts)
            tokens = prompt[: random.randrange(self._block_tokens, len(prompt) + 1)]
            try:
                if random.random() < RESET:
                    self._reset()
                elif random.random() < 0.5:
                    self._save(tokens)
                else:
                    self._load(tokens)
            except KvferryError as error:
                if isinstance(error, InvariantError):
                    raise

    @property
    def _block_tokens(self) -> int:
        return self.plan.layout.virtual_block_tokens

    def watch(self) -> None:
        """Wait for ever."""
        Event(self.network.world).wait()

    def _save(self, tokens: Sequence[int]) -> None:
        stores = self._stores()
        if not stores:
            return
        store = self.network.world.random.choice(stores)
        stamp = self._saves.begin()
        hashes = hash_tokens(self.plan.scheme, tokens, NO_KEYS)
        blocks = self._blocks(len(hashes))
        self.worker.reused(blocks)
        for index, block in enumerate(blocks):
            self._write(block, self._states(tokens, index), stamp)
        self.worker.written(FIRST_GROUP, zip(hashes, blocks, strict=True))
        ask = make_take_ask(
            self.plan.identity, hashes, group_id=FIRST_GROUP, first_block=0, source=self._source()
        )
        world = self.network.world
        self.network.call(
            store.process,
            lambda: store.service.accept_take(
                ask,
                timeout_s=TRANSFER_TIMEOUT_S,
                cancel=Event(world),  # type: ignore[arg-type]
            ),
            timeout_s=world.random.choice([SHORT_SAVE_S, TRANSFER_TIMEOUT_S]),
        )
        self._saves.ended_s[stamp] = world.now_s

    def _load(self, tokens: Sequence[int]) -> None:
        reset_begun_s = self._saves.reset_begun_s
        hashes = hash_tokens(self.plan.scheme, tokens, NO_KEYS)
        acquire = AcquireLease(
            call_id=self._call_id(),
            identity_digest=self.plan.identity.digest(),
            hashes=tuple(hashes),
            ttl_s=LEASE_S,
        )
        leased = expect(self.call(acquire), Leased)
        if leased.lease_id is None or leased.source is None:
            return
        num_arrived = self._pull(hashes[: leased.num_hashes], leased.source, leased)
        release = ReleaseLease(call_id=self._call_id(), lease_id=leased.lease_id)
        if expect(self.call(release), Done).changed:
            for index in range(num_arrived):
                self._require(BlockId(1 + index), self._states(tokens, index), reset_begun_s)
            self._saves.num_loaded_blocks += num_arrived

    def _pull(self, hashes: Sequence[BlockHash], source: Source, leased: Leased) -> int:
        assert leased.lease_id is not None
        load = group_load(
            hashes,
            FIRST_GROUP,
            self._blocks(len(hashes)),
            first_block=0,
            block_tokens=self._block_tokens,
            source_block_tokens=source.layout.virtual_block_tokens,
            hash_block_tokens=self.plan.scheme.hash_block_tokens,
        )
        outcome = self.worker.pull(
            source=source,
            lease_id=leased.lease_id,
            loads=[load],
            timeout_s=TRANSFER_TIMEOUT_S,
            cancel=Event(self.network.world),
        )
        return outcome.num_blocks_of_run[0]

    def _reset(self) -> None:
        begun_s = self.network.world.now_s
        command: Command = ResetIdentity(
            call_id=self._call_id(), identity_digest=self.plan.identity.digest()
        )
        reply: Reply = self.call(command)
        expect(reply, Forgotten)
        self._saves.reset_begun_s = max(self._saves.reset_begun_s, begun_s)
        self._saves.num_resets += 1

    def _source(self) -> Source:
        return Source(
            instance_id=self.plan.instance_id,
            incarnation=self.incarnation,
            layout=self.worker.memory.layout,
            rank_addresses=self.info.rank_addresses,
        )

    def _states(self, tokens: Sequence[int], index: int) -> list[int]:
        size = self._block_tokens
        states = states_of(tokens, NO_KEYS, self.plan.identity.weight_version)
        return states[index * size : (index + 1) * size]

    def _write(self, block: BlockId, states: Sequence[int], stamp: int) -> None:
        for layer in self._layers:
            layer[:, block, :, :, 0] = np.array(states, np.float32)[:, None]
            layer[:, block, :, :, 1] = stamp

    def _require(self, block: BlockId, states: Sequence[int], reset_begun_s: float) -> None:
        for layer in self._layers:
            found = layer[:, block]
            stamps = set(found[..., 1].ravel().tolist())
            expected = np.array(states, np.float32)[:, None]
            if (found[..., 0] != expected).any() or len(stamps) != 1:
                raise InvariantError(
                    f"block {block} of {self.plan.instance_id} holds what its hash does not say",
                    given=str(found[0].tolist()),
                    allowed=list(states),
                )
            self._saves.require_current(int(stamps.pop()), reset_begun_s)

    def _blocks(self, count: int) -> list[BlockId]:
        return [BlockId(1 + index) for index in range(count)]

    def _call_id(self) -> str:
        self._num_calls += 1
        return f"{self.name}/{self._num_calls}"


def prompts_for_clients(random: Random, max_model_len: int) -> list[tuple[int, ...]]:
    """Return prompts of which two share their first half."""
    shared = tokens_of(random, max_model_len // 2)
    return [
        *(shared + tokens_of(random, max_model_len // 2) for _ in range(2)),
        tokens_of(random, max_model_len),
    ]
