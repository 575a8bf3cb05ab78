"""What the cache of one layer looks like: its kind, bytes of a page, the most a request can take.

A page is what one block id covers in one layer on one rank: `block_tokens` token slots, or one
state. All sizes are in bytes unless a name says otherwise. Nothing here needs torch: dtypes are its
names without prefix ("bfloat16").
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, get_args

from kvferry.proto.errors import ConfigError

ProfileName = Literal["0.17", "0.32"]
"""The version of vLLM whose decisions are reproduced."""

CURRENT_PROFILE: Final[ProfileName] = "0.32"

SpecKind = Literal["full", "mla", "sliding_window", "chunked_local", "mamba", "cross", "sink"]
StateMode = Literal["none", "all", "align"]
MemoryOrder = Literal["LBHNC", "BLHNC"]
"""Which axis is outermost in memory: L is the layer, B the block (then heads, tokens, content)."""

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    | dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8"), 1)
)

FP8_DS_MLA = "fp8_ds_mla"
# 512 bytes of fp8 latent, 16 of scales, 128 of bfloat16 rotary part.
_FP8_DS_MLA_TOKEN_BYTES = 656


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What bounds the memory of one request.

    `max_model_len` is in tokens. `max_in_flight_tokens` are the tokens that may be scheduled and
    not yet settled (0.17: those of one batch). `dcp` and `pcp` are the numbers of context-parallel
    ranks.

    Raises:
        ConfigError: a limit is no integer of at least 1 (`max_encoder_tokens`: at least 0).
    """

    max_model_len: int
    max_in_flight_tokens: int
    max_encoder_tokens: int = 0
    dcp: int = 1
    pcp: int = 1
    profile: ProfileName = CURRENT_PROFILE

    def __post_init__(self) -> None:
        require_one_of("profile", self.profile, get_args(ProfileName))
        for name in ("max_model_len", "max_in_flight_tokens", "dcp", "pcp"):
            require_integer(name, getattr(self, name), at_least=1)
        require_integer("max_encoder_tokens", self.max_encoder_tokens, at_least=0)

    @property
    def token_shards(self) -> int:
        """Ranks that the tokens of one sequence are dealt over."""
        return self.dcp * self.pcp if self.profile == "0.17" else self.dcp


@dataclass(frozen=True, kw_only=True)
class LayerSpec(ABC):
    """The cache of one layer on one rank.

    `event_kind` is what KV events call the kind. Groups of equal specs are looked up jointly.
    `page_padded`, where given, is the size in bytes that a page is padded to.

    Raises:
        ConfigError: a size is no positive integer, a name is unknown, or the padded page is smaller
            than what it holds.
    """

    kind: ClassVar[SpecKind]
    event_kind: ClassVar[str]
    block_tokens: int
    page_padded: int | None = None

    def __post_init__(self) -> None:
        require_integer("block_tokens", self.block_tokens, at_least=1)
        self._check()
        if self.page_padded is not None:
            require_integer("page_padded", self.page_padded, at_least=self.content_bytes)

    @abstractmethod
    def _check(self) -> None:
        """Refuse fields of the subclass that cannot be."""

    @property
    @abstractmethod
    def content_bytes(self) -> int:
        """Bytes of a page that are used."""

    @property
    def window_tokens_in_events(self) -> int | None:
        """The window that KV events tell, in tokens; None for kinds without one."""
        return None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, padding included."""
        return self.content_bytes if self.page_padded is None else self.page_padded

    @abstractmethod
    def request_pages(self, limits: RequestLimits) -> int:
        """Return the most pages one request can hold in this layer, on one rank.

        Raises:
            ConfigError: this kind cannot be used under these limits.
        """

    def request_bytes(self, limits: RequestLimits) -> int:
        """Return the most bytes one request can take in this layer, on one rank.

        Raises:
            ConfigError: as `request_pages`.
        """
        return self.request_pages(limits) * self.page_bytes


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """A layer that keeps K and V of every token: `[2, block_tokens, kv_heads, head_dim]` a page.

    `head_dim_v` is the width of V where it differs from that of K.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    head_dim_v: int | None = None

    def _check(self) -> None:
        for name in ("kv_heads", "head_dim"):
            require_integer(name, getattr(self, name), at_least=1)
        if self.head_dim_v is not None:
            require_integer("head_dim_v", self.head_dim_v, at_least=1)
        require_one_of("dtype", self.dtype, tuple(DTYPE_BYTES))

    @property
    def content_bytes(self) -> int:
        """Bytes of K and V of `block_tokens` tokens."""
        width = self.head_dim + (self.head_dim if self.head_dim_v is None else self.head_dim_v)
        return self.block_tokens * self.kv_heads * width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class WholeLengthSpec(AttentionSpec):
    """A layer that keeps the blocks of all tokens, whatever it reads of them."""

    def request_pages(self, limits: RequestLimits) -> int:
        """Return the pages of this rank's share of the longest sequence."""
        return _ceil_div(_ceil_div(limits.max_model_len, limits.token_shards), self.block_tokens)


@dataclass(frozen=True, kw_only=True)
class FullSpec(WholeLengthSpec):
    """Full attention: every token attends to all tokens before it.

    `window_tokens` and `chunk_tokens` are remembered from a local layer that keeps blocks for all
    tokens although it reads only its own range.
    """

    kind: ClassVar[SpecKind] = "full"
    event_kind: ClassVar[str] = "full_attention"
    window_tokens: int | None = None
    chunk_tokens: int | None = None

    def _check(self) -> None:
        super()._check()
        for name in ("window_tokens", "chunk_tokens"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), at_least=1)


@dataclass(frozen=True, kw_only=True)
class SinkSpec(FullSpec):
    """Full attention whose first `sink_tokens` tokens every request shares."""

    kind: ClassVar[SpecKind] = "sink"
    event_kind: ClassVar[str] = "sink_full_attention"
    sink_tokens: int

    def _check(self) -> None:
        super()._check()
        require_integer("sink_tokens", self.sink_tokens, at_least=1)


@dataclass(frozen=True, kw_only=True)
class MlaSpec(WholeLengthSpec):
    """One latent vector a token, no V: `[block_tokens, kv_heads, head_dim]` a page.

    With `cache_dtype` "fp8_ds_mla" a token takes 656 bytes, whatever the other fields say.
    """

    kind: ClassVar[SpecKind] = "mla"
    event_kind: ClassVar[str] = "mla_attention"
    cache_dtype: str | None = None

    def _check(self) -> None:
        super()._check()
        if self.head_dim_v is not None:
            raise ConfigError("an mla layer has no V", given=self.head_dim_v)

    @property
    def content_bytes(self) -> int:
        """Bytes of the latent vectors of `block_tokens` tokens."""
        if self.cache_dtype == FP8_DS_MLA:
            return self.block_tokens * _FP8_DS_MLA_TOKEN_BYTES
        return self.block_tokens * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention of a token to itself and the `window_tokens - 1` tokens before it.

    Blocks before them are given back.
    """

    kind: ClassVar[SpecKind] = "sliding_window"
    event_kind: ClassVar[str] = "sliding_window"
    window_tokens: int

    def _check(self) -> None:
        super()._check()
        require_integer("window_tokens", self.window_tokens, at_least=1)

    @property
    def window_tokens_in_events(self) -> int | None:
        """The window itself, in tokens."""
        return self.window_tokens

    def request_pages(self, limits: RequestLimits) -> int:
        """Return the pages of the window and the tokens in flight.

        Raises:
            ConfigError: the tokens of a sequence are dealt over several ranks (`dcp` above 1).
        """
        if limits.dcp != 1:
            raise ConfigError(
                "a sliding window cannot be dealt over context-parallel ranks",
                given={"dcp": limits.dcp},
                allowed={"dcp": 1},
            )
        held = self.window_tokens - 1 + limits.max_in_flight_tokens
        # One more, because the window seldom starts at the beginning of a block.
        return _ceil_div(min(held, limits.max_model_len), self.block_tokens) + 1


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """Attention within chunks of `chunk_tokens`; blocks of earlier chunks are given back."""

    kind: ClassVar[SpecKind] = "chunked_local"
    event_kind: ClassVar[str] = "chunked_local_attention"
    chunk_tokens: int

    def _check(self) -> None:
        super()._check()
        require_integer("chunk_tokens", self.chunk_tokens, at_least=1)

    def request_pages(self, limits: RequestLimits) -> int:
        """Return the pages of one chunk and the tokens in flight."""
        held = self.chunk_tokens + limits.max_in_flight_tokens
        return _ceil_div(min(held, limits.max_model_len), self.block_tokens)


@dataclass(frozen=True, kw_only=True)
class CrossSpec(AttentionSpec):
    """Cross attention: K and V of the encoder's tokens; requests share nothing of it."""

    kind: ClassVar[SpecKind] = "cross"
    event_kind: ClassVar[str] = "cross_attention"

    def request_pages(self, limits: RequestLimits) -> int:
        """Return the pages of the longest encoder input.

        Raises:
            ConfigError: `max_encoder_tokens` is not set.
        """
        require_integer("max_encoder_tokens", limits.max_encoder_tokens, at_least=1)
        return _ceil_div(limits.max_encoder_tokens, self.block_tokens)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(LayerSpec):
    """A recurrent layer: a page is one state, made of tensors of these shapes and dtypes.

    `mode` says which states stay: "none" the running one, "align" that and the last at a block
    boundary, "all" one a block. `speculative_blocks` states more serve draft tokens.
    """

    kind: ClassVar[SpecKind] = "mamba"
    event_kind: ClassVar[str] = "mamba"
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mode: StateMode = "none"
    speculative_blocks: int = 0

    def _check(self) -> None:
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise ConfigError(
                "a state needs one dtype for each shape",
                given={"shapes": len(self.shapes), "dtypes": len(self.dtypes)},
            )
        for size in (size for shape in self.shapes for size in shape):
            require_integer("state shape", size, at_least=1)
        for dtype in self.dtypes:
            require_one_of("dtype", dtype, tuple(DTYPE_BYTES))
        require_one_of("mode", self.mode, get_args(StateMode))
        require_integer("speculative_blocks", self.speculative_blocks, at_least=0)

    @property
    def content_bytes(self) -> int:
        """Bytes of one state, however many tokens it covers."""
        return sum(
            prod(shape) * DTYPE_BYTES[dtype]
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def request_pages(self, limits: RequestLimits) -> int:
        """Return the number of states that one request holds at a time."""
        if self.mode == "align":
            return 2 + self.speculative_blocks
        if self.mode == "all" and limits.profile == "0.17":
            return _ceil_div(limits.max_model_len, self.block_tokens)
        # 0.32 counts only the state that cannot be given up; cached ones may be evicted.
        return 1 + self.speculative_blocks


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def require_integer(name: str, value: Any, *, at_least: int) -> None:
    """Refuse what is no integer (bool is none) of at least `at_least`.

    Raises:
        ConfigError: naming the setting.
    """
    if type(value) is not int or value < at_least:
        raise ConfigError(f"{name} must be an integer", given=repr(value), allowed=f">= {at_least}")


def require_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a name that is not among the allowed ones.

    Raises:
        ConfigError: naming the setting and what it may be.
    """
    if value not in allowed:
        raise ConfigError(f"unknown {name}", given=value, allowed=list(allowed))
