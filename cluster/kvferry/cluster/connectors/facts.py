"""What a connector knows of its engine, whichever engine it is. Pure."""

from dataclasses import dataclass, replace

from kvferry.cluster.engine_info import EngineInfo
from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.scheme import HashScheme
from kvferry.proto.shared_chain import hashes_per_block
from kvferry.proto.specs import CURRENT_PROFILE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine: who it is, what its blocks hold, and how its ranks share them.

    `layout` is that of the engine's ranks with blocks of one hash block over all ranks, which is
    how its blocks travel; `engine_block_tokens` are the tokens of one block id of the engine itself
    over all ranks. `version` says what it runs, such as "vllm 0.32.0".

    Raises:
        ConfigError: the engine's blocks are no multiple of the hash block.
    """

    engine_id: str
    incarnation: Incarnation
    identity: Identity
    scheme: HashScheme
    layout: Layout
    engine_block_tokens: int
    version: str

    def __post_init__(self) -> None:
        hashes_per_block(self.engine_block_tokens, self.scheme.hash_block_tokens)

    @property
    def instance_id(self) -> InstanceId:
        """The engine's name as a source of blocks."""
        return InstanceId(f"engine-{self.engine_id}")

    @property
    def info(self) -> EngineInfo:
        """The engine as people are shown it."""
        block_tokens = self.engine_block_tokens // self.layout.token_shards
        return EngineInfo(
            engine_id=self.engine_id,
            layout=replace(self.layout, block_tokens=block_tokens),
            version=self.version,
        )

    @property
    def hash_block_tokens(self) -> int:
        """Tokens of one hash."""
        return self.scheme.hash_block_tokens

    @property
    def hashes_per_block(self) -> int:
        """Hash blocks of one block of the engine; loads begin and end at multiples of this."""
        return hashes_per_block(self.engine_block_tokens, self.hash_block_tokens)


def travelling_layout(engine: Layout, hash_block_tokens: int) -> Layout:
    """Return an engine's layout with blocks of one hash block over all ranks.

    Raises:
        ConfigError: the tokens of a hash block cannot be dealt over the engine's ranks.
    """
    shards = engine.token_shards
    if hash_block_tokens % (shards * engine.interleave):
        raise ConfigError(
            "the service's hash blocks cannot be dealt over this engine's ranks",
            given={"hash_block_tokens": hash_block_tokens},
            allowed=f"a multiple of {shards} ranks x interleave {engine.interleave}",
        )
    if engine.pcp == engine.dcp == 1:
        # In these words it may be equal to a store's layout, and whole blocks move.
        engine = replace(engine, kind="grid", profile=CURRENT_PROFILE)
    return Layout(
        block_tokens=hash_block_tokens // shards,
        kind=engine.kind,
        tp=engine.tp,
        pp=engine.pp,
        pcp=engine.pcp,
        dcp=engine.dcp,
        interleave=engine.interleave,
        profile=engine.profile,
        stage_layers=engine.stage_layers,
    )
