"""What the scheduler half of a connector tells the worker halves with each step. Pure values.

Blocks of an engine are its virtual blocks: one id covers `EngineFacts.engine_block_tokens` tokens
over all its ranks. Hash blocks are the service's.
"""

from dataclasses import dataclass

from kvferry.proto.ids import BlockHash
from kvferry.proto.step_messages import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBlocks:
    """Consecutive blocks of one request at the engine, from its `first`-th on."""

    first: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPrefix:
    """Who said to hold a prefix, and of how many hash blocks."""

    source: Source
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """Hash blocks `first_block` and following of a request are complete after this step."""

    request_id: str
    first_block: int
    hashes: tuple[BlockHash, ...]
    blocks: EngineBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Fill an engine's blocks with hash blocks [first_block, end_block) of `chain`.

    `chain` goes on beyond the end where a source's last block does. `holders` are asked in turn.
    """

    request_id: str
    first_block: int
    end_block: int
    chain: tuple[BlockHash, ...]
    blocks: EngineBlocks
    holders: tuple[HeldPrefix, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrders:
    """One step's orders.

    `overwritten`: the engine's blocks that this step or a load of it writes into, whatever they
    held. `held`: finished requests whose blocks the engine keeps until they are reported as saved.
    `cancelled`: requests whose loads nobody waits for. `engine`: where the engine's ranks can be
    fetched from, and `store_address` who takes their blocks; None where saving is not possible now.
    `is_idle`: nothing is computed in this step. `is_reset`: forget everything not saved yet.
    """

    saves: tuple[SaveOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    cancelled: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    overwritten: frozenset[int] = frozenset()
    engine: Source | None = None
    store_address: str | None = None
    is_idle: bool = False
    is_reset: bool = False
