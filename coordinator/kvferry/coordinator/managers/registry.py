"""Which manager keeps the tables of which kind of group."""

from kvferry.coordinator.block_pool import BlockPool
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.managers.base import GroupManager
from kvferry.coordinator.managers.chunked_local import ChunkedLocalManager
from kvferry.coordinator.managers.cross import CrossManager
from kvferry.coordinator.managers.full import FullManager, SinkManager
from kvferry.coordinator.managers.mamba import MambaManager
from kvferry.coordinator.managers.mamba_align import MambaAlignManager
from kvferry.coordinator.managers.sliding_window import SlidingWindowManager
from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import GroupId
from kvferry.proto.specs import (
    ChunkedLocalSpec,
    CrossSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    MlaSpec,
    SinkSpec,
    SlidingWindowSpec,
)

_MANAGERS: dict[type[LayerSpec], type[GroupManager]] = {
    FullSpec: FullManager,
    MlaSpec: FullManager,
    SinkSpec: SinkManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalSpec: ChunkedLocalManager,
    MambaSpec: MambaManager,
    CrossSpec: CrossManager,
}


def make_manager(pool: BlockPool, config: CacheConfig, group_id: GroupId) -> GroupManager:
    """Return the manager of one group of a configuration.

    Raises:
        ConfigError: nobody manages this kind.

    """
    spec = config.groups[group_id]
    if isinstance(spec, MambaSpec) and spec.mode == "align":
        return MambaAlignManager(pool, config, group_id)
    manager = _MANAGERS.get(type(spec))
    if manager is None:
        raise ConfigError(
            "unknown kind of group",
            given=type(spec).__name__,
            allowed=sorted(known.__name__ for known in _MANAGERS),
        )
    return manager(pool, config, group_id)
