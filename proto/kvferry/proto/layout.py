"""Which rank holds which token, head and layer of a sequence, and in which slot.

Today one rank holds everything; the general layout (tp, pp, dcp, pcp, interleave, strides) takes
this class's place without changing its users.
"""

from dataclasses import dataclass

from kvferry.proto.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A one-rank layout: every block holds `block_tokens` tokens of all heads and layers."""

    block_tokens: int

    def __post_init__(self) -> None:
        if type(self.block_tokens) is not int or self.block_tokens < 1:
            raise ConfigError(
                "block_tokens must be a positive integer", given=self.block_tokens, allowed=">= 1"
            )

    @property
    def num_ranks(self) -> int:
        """Number of worker actors that together hold the cache."""
        return 1

    @property
    def virtual_block_tokens(self) -> int:
        """Tokens that one block id covers over all ranks."""
        return self.block_tokens
