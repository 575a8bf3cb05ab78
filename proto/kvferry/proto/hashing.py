"""The hash chain: one hash per full block, each covering everything before it.

`H_i = digest((H_{i-1} or NONE_HASH, tokens of block i, extra keys or None))`, bit-identical to
vLLM 0.17 and 0.32 for plain prompts, and to the version named by the scheme's key format otherwise.
A block's hash stands for the block and its whole prefix, so equal hashes mean equal KV bytes under
one identity.
"""

import reprlib
from collections.abc import Sequence
from typing import get_args

from kvferry.proto.block_links import ExtraKeys, link, link_blocks
from kvferry.proto.digest import digest
from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.extra_keys import NO_KEYS, RequestKeys, block_extra_keys, require_keys
from kvferry.proto.ids import BlockHash
from kvferry.proto.scheme import Algorithm, HashScheme, KeyFormat
from kvferry.proto.tokens import pack_tokens

DEFAULT_SEED_032 = "vllm-none-hash"
"""What vLLM 0.32 hashes for the root when PYTHONHASHSEED is unset and the algorithm is sha256*.

With xxhash*, and in vLLM 0.17 with any algorithm, an unset seed means a random root, which nothing
can share.
"""


def compute_none_hash(algorithm: Algorithm, seed: str) -> bytes:
    """Return the chain's root (32 or 16 bytes) for the text of PYTHONHASHSEED.

    Raises:
        ConfigError: unknown algorithm, or a seed that is not a text that UTF-8 can encode.
    """
    # A lone surrogate, as os.environ makes of a stray byte, has no encoding to hash.
    if type(seed) is not str or any("\ud800" <= letter <= "\udfff" for letter in seed):
        raise ConfigError(
            "the hash seed must be a text",
            given=f"{seed!r} ({type(seed).__name__})",
            allowed='the text of PYTHONHASHSEED, such as "0"',
        )
    return digest(algorithm, seed)


def make_scheme(
    *,
    seed: str = "0",
    hash_block_tokens: int,
    algorithm: Algorithm = "sha256_cbor",
    key_format: KeyFormat = "0.32",
) -> HashScheme:
    """Return the scheme with the root that belongs to `seed`.

    Raises:
        ConfigError: a seed that is not a text, or what `HashScheme` refuses.
    """
    return HashScheme(
        algorithm=algorithm,
        key_format=key_format,
        hash_block_tokens=hash_block_tokens,
        none_hash=compute_none_hash(algorithm, seed),
    )


def hash_block(
    scheme: HashScheme,
    parent: bytes | bytearray | memoryview,
    tokens: object,
    extra_keys: tuple[object, ...] | None,
) -> BlockHash:
    """Return the hash of one full block.

    Args:
        scheme: the service's scheme.
        parent: the hash before it, `scheme.none_hash` for the first block.
        tokens: `scheme.hash_block_tokens` ids, in any form `pack_tokens` takes.
        extra_keys: what `block_extra_keys` returns for this block.

    Raises:
        TokenError: a token that cannot be hashed.
        BadInputError: the block is not full, the parent is not bytes or empty, or the extra keys
            are not of the form that `block_extra_keys` returns.
    """
    if not isinstance(parent, (bytes, bytearray, memoryview)) or not len(parent):
        raise BadInputError(
            "the parent hash must be bytes",
            given=f"{reprlib.repr(parent)} ({type(parent).__name__})",
            allowed="bytes, bytearray or memoryview, not empty",
        )
    _require_extra_keys(extra_keys)
    plain = pack_tokens(tokens, who="block")
    if len(plain) != scheme.hash_block_tokens:
        raise BadInputError(
            "only full blocks are hashed",
            given=f"{len(plain)} tokens",
            allowed=f"{scheme.hash_block_tokens} tokens",
        )
    # CBOR encoders disagree about bytearray and memoryview; pickle writes other bytes for them.
    return link(scheme, bytes(parent), plain, extra_keys)


def _require_extra_keys(extra_keys: object) -> None:
    fits = extra_keys is None or (isinstance(extra_keys, tuple) and all(map(_is_key, extra_keys)))
    if not fits:
        raise BadInputError(
            "these are no extra keys",
            given=reprlib.repr(extra_keys),
            allowed="None, or a tuple of texts, digests and tuples that begin with a text",
        )


def _is_key(key: object) -> bool:
    if isinstance(key, tuple):
        is_tagged = bool(key) and isinstance(key[0], str)
        return is_tagged and all(isinstance(part, (str, bytes, int)) for part in key)
    return isinstance(key, (str, bytes))


def _require_key_format(key_format: object) -> None:
    if key_format not in get_args(KeyFormat):
        raise ConfigError(
            "unknown key format", given=repr(key_format), allowed=list(get_args(KeyFormat))
        )


class HashChain:
    """The chain of one request, grown as its tokens arrive.

    The first `extend` takes the whole prompt: format 0.17 hashes what comes later differently
    (`block_extra_keys`). Format 0.32 does not care how the tokens are cut.

    Raises:
        BadInputError: `keys` is no `RequestKeys`.
    """

    def __init__(
        self, scheme: HashScheme, keys: RequestKeys = NO_KEYS, *, who: str = "request"
    ) -> None:
        require_keys(keys)
        self._scheme = scheme
        self._keys = keys
        self._who = who
        self._hashes: tuple[BlockHash, ...] = ()
        self._tail = pack_tokens()

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """The hashes of all full blocks so far, first block first."""
        return self._hashes

    @property
    def num_tokens(self) -> int:
        """Number of tokens taken so far, the ones after the last full block included."""
        return len(self._hashes) * self._scheme.hash_block_tokens + len(self._tail)

    def extend(self, tokens: object) -> tuple[BlockHash, ...]:
        """Take more tokens (see `pack_tokens`) and return the hashes of newly full blocks.

        Raises:
            TokenError: a token that cannot be hashed; the chain is as it was.
        """
        new_tokens = pack_tokens(tokens, who=self._who)
        waiting = self._tail + new_tokens if self._tail else new_tokens
        size = self._scheme.hash_block_tokens
        num_full = len(waiting) // size * size
        if not num_full:  # the usual case while decoding
            self._tail = waiting
            return ()
        parent = self._hashes[-1] if self._hashes else self._scheme.none_hash
        new = tuple(
            link_blocks(self._scheme, parent, waiting[:num_full], self._extra_keys(num_full))
        )
        self._hashes += new
        self._tail = waiting[num_full:]
        return new

    def _extra_keys(self, num_tokens: int) -> list[ExtraKeys]:
        """Return the extra keys of the next blocks, of `num_tokens` tokens together."""
        size = self._scheme.hash_block_tokens
        if self._keys == NO_KEYS:
            return [None] * (num_tokens // size)
        resumed_at = len(self._hashes) * size
        return [
            block_extra_keys(
                self._scheme.key_format, self._keys, start, start + size, resumed_at=resumed_at
            )
            for start in range(resumed_at, resumed_at + num_tokens, size)
        ]


def hash_tokens(
    scheme: HashScheme,
    tokens: object,
    keys: RequestKeys = NO_KEYS,
    *,
    who: str = "request",
) -> tuple[BlockHash, ...]:
    """Return the hashes of all full blocks of `tokens`, hashed in one pass.

    Raises:
        TokenError: a token that cannot be hashed.
        BadInputError: `keys` is no `RequestKeys`.
    """
    return HashChain(scheme, keys, who=who).extend(tokens)


def merged_view(
    hashes: Sequence[BlockHash], *, ratio: int, key_format: KeyFormat
) -> tuple[BlockHash, ...]:
    """Return one hash per run of `ratio` hash blocks; an incomplete last run is left out.

    Format 0.32 takes the last hash of the run (it covers the others), 0.17 joins them all.

    Raises:
        BadInputError: `ratio` below 1, or hashes that are no sequence of bytes.
        ConfigError: unknown key format.
    """
    _require_key_format(key_format)
    if not isinstance(hashes, Sequence) or not all(isinstance(one, bytes) for one in hashes):
        raise BadInputError(
            "the hashes to merge must be bytes",
            given=reprlib.repr(hashes),
            allowed="a sequence of bytes",
        )
    if type(ratio) is not int or ratio < 1:
        raise BadInputError("ratio must be a positive integer", given=repr(ratio), allowed=">= 1")
    if key_format == "0.32":
        return tuple(hashes[ratio - 1 :: ratio])
    starts = range(0, len(hashes) - ratio + 1, ratio)
    return tuple(BlockHash(b"".join(hashes[start : start + ratio])) for start in starts)
