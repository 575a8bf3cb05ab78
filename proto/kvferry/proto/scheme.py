"""The hash scheme: everything two processes must share for their hashes to be equal."""

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from kvferry.proto.errors import ConfigError, SchemeMismatchError

Algorithm = Literal["sha256_cbor", "sha256", "xxhash_cbor", "xxhash"]
KeyFormat = Literal["0.32", "0.17"]

MAX_HASH_BLOCK_TOKENS = 2**31
_HASH_BYTES: dict[Algorithm, int] = {
    "sha256_cbor": 32,
    "sha256": 32,
    "xxhash_cbor": 16,
    "xxhash": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HashScheme:
    """One scheme per service.

    `none_hash` is the chain's root, made from the text of PYTHONHASHSEED by the algorithm.
    `hash_block_tokens` is the number of tokens that one hash covers.

    Raises:
        ConfigError: an unknown name, a size out of range, or a root that is no hash of the
            algorithm.
    """

    algorithm: Algorithm
    key_format: KeyFormat
    hash_block_tokens: int
    none_hash: bytes

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise ConfigError(
                "unknown hash algorithm",
                given=str(self.algorithm),
                allowed=list(get_args(Algorithm)),
            )
        if self.key_format not in get_args(KeyFormat):
            raise ConfigError(
                "unknown key format", given=str(self.key_format), allowed=list(get_args(KeyFormat))
            )
        size = self.hash_block_tokens
        if type(size) is not int or not 1 <= size <= MAX_HASH_BLOCK_TOKENS:
            raise ConfigError(
                "hash_block_tokens out of range",
                given=str(size),
                allowed=f"1 to {MAX_HASH_BLOCK_TOKENS}",
            )
        root, root_bytes = self.none_hash, _HASH_BYTES[self.algorithm]
        if not isinstance(root, bytes) or len(root) != root_bytes:
            raise ConfigError(
                f"none_hash is no hash of {self.algorithm}",
                given=str(_printable(root)),
                allowed=f"{root_bytes} bytes",
            )


def require_equal_schemes(ours: HashScheme, theirs: HashScheme, *, who: str) -> None:
    """Refuse a peer whose hashes could never match ours.

    Raises:
        SchemeMismatchError: naming each differing field with the peer's value (`given`) and ours
            (`allowed`).
    """
    mine, other = asdict(ours), asdict(theirs)
    differing = [name for name in mine if mine[name] != other[name]]
    if differing:
        raise SchemeMismatchError(
            f"{who} hashes blocks under another scheme than the service",
            given={name: _printable(other[name]) for name in differing},
            allowed={name: _printable(mine[name]) for name in differing},
        )


def _printable(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
