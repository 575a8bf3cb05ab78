"""What a group of layers needs of its blocks: one class per kind of attention.

All counts are in tokens of one rank. Groups with equal specs are looked up jointly.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.proto.errors import ConfigError

MambaMode = Literal["none", "all", "align"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """`block_tokens` tokens per block on one rank; `kind` is the name used in events."""

    kind: ClassVar[str]
    block_tokens: int

    def __post_init__(self) -> None:
        _require_positive("block_tokens", self.block_tokens)

    @property
    def window_tokens_in_events(self) -> int | None:
        """The window that events tell, None for kinds without one."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSpec(CacheSpec):
    """Every token attends to all tokens before it."""

    kind: ClassVar[str] = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec(FullSpec):
    """Full attention over a compressed latent: one head, no separate values."""

    kind: ClassVar[str] = "mla_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec(FullSpec):
    """Full attention plus `sink_tokens` learned tokens that every request sees."""

    kind: ClassVar[str] = "sink_full_attention"
    sink_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(CacheSpec):
    """A token attends to itself and the `window_tokens - 1` tokens before it."""

    kind: ClassVar[str] = "sliding_window"
    window_tokens: int

    def __post_init__(self) -> None:
        _require_positive("block_tokens", self.block_tokens)
        _require_positive("window_tokens", self.window_tokens)

    @property
    def window_tokens_in_events(self) -> int | None:
        """The window itself."""
        return self.window_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalSpec(CacheSpec):
    """A token attends to the tokens before it in its chunk of `chunk_tokens`."""

    kind: ClassVar[str] = "chunked_local_attention"
    chunk_tokens: int

    def __post_init__(self) -> None:
        _require_positive("block_tokens", self.block_tokens)
        _require_positive("chunk_tokens", self.chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(CacheSpec):
    """A recurrent state per block end instead of a cache of tokens.

    `mode`: "none" and "all" keep a block per `block_tokens` tokens, "align" only the states at
    which computing stopped. `speculative_blocks` more hold the states of draft tokens.
    """

    kind: ClassVar[str] = "mamba"
    mode: MambaMode
    speculative_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSpec(CacheSpec):
    """Attends to the encoder's tokens; nothing of it is shared between requests."""

    kind: ClassVar[str] = "cross_attention"


def _require_positive(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be a positive integer", given=repr(value), allowed=">= 1")
