"""The identity: everything under which cached bytes are interchangeable, and its digest.

Layout, block size and parallel sizes are deliberately not part of it: those are resharded.
"""

import hashlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import cbor2

from kvferry.proto.errors import BadInputError, ConfigError, IdentityMismatchError
from kvferry.proto.specs import DTYPE_BYTES, require_integer, require_one_of

GroupKind = Literal["full", "sliding_window", "chunked_local", "mamba"]

# The setting that a kind needs, and no other kind has.
_SETTING_OF_KIND = {
    "sliding_window": "window_tokens",
    "chunked_local": "chunk_tokens",
    "mamba": "state_bytes",
}

_TEXTS = ("model", "weight_version", "weight_dtype", "kv_dtype", "kv_scales", "rope")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Layers that share one kind of attention and one block table.

    A sliding-window layer attends to a token and the `window_tokens - 1` before it, a chunked-local
    one to those before it in its chunk of `chunk_tokens`; a mamba layer keeps one recurrent state
    of `state_bytes` bytes. These are None for every other kind.

    Raises:
        ConfigError: an unknown kind, a layer that is no integer of at least 0, or a setting that is
            missing, too many or no integer of at least 1.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    state_bytes: int | None = None

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, get_args(GroupKind))
        for layer in self.layers:
            require_integer("layers", layer, at_least=0)
        needed = _SETTING_OF_KIND.get(self.kind)
        for name in _SETTING_OF_KIND.values():
            value = getattr(self, name)
            if name == needed:
                require_integer(name, value, at_least=1)
            elif value is not None:
                raise ConfigError(
                    f"{name} is no setting of this kind of group", given=value, allowed=self.kind
                )

    def first_needed_block(self, num_blocks: int, block_tokens: int) -> int:
        """Return the first block that tokens after the prefix of `num_blocks` blocks still need.

        They need all from there to the end of the prefix, and none before. `num_blocks` is at
        least 1; the answer never falls as it grows, and equals it only where a chunk begins.
        """
        num_tokens = num_blocks * block_tokens
        if self.window_tokens is not None:
            # A window of one token needs no block, but what ends a prefix must be there.
            skipped_tokens = max(0, num_tokens - self.window_tokens + 1)
            return min(skipped_tokens // block_tokens, num_blocks - 1)
        if self.chunk_tokens is not None:
            return num_tokens // self.chunk_tokens * self.chunk_tokens // block_tokens
        return num_blocks - 1 if self.kind == "mamba" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What cached bytes depend on.

    `weight_version` is a digest of the weights (or the operator's own version text); new weights
    under the same name are a new identity. `rope` is the canonical text of the rope settings.
    dtypes are torch names without prefix ("float32", "bfloat16"); `kv_scales` is "" when the cache
    is not quantised. `head_size` is the elements of one head's key, and of its value.

    Raises:
        ConfigError: a text that is none, a size that is no positive integer, or groups that do not
            cover every layer exactly once.
    """

    model: str
    weight_version: str
    weight_dtype: str
    kv_dtype: str
    kv_scales: str
    rope: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    groups: tuple[GroupSpec, ...]

    def __post_init__(self) -> None:
        for name in _TEXTS:
            text = getattr(self, name)
            if not isinstance(text, str):
                raise ConfigError(f"{name} must be a text", given=repr(text), allowed="str")
        for name in ("num_layers", "num_kv_heads", "head_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer", given=value, allowed=">= 1")
        covered = sorted(layer for group in self.groups for layer in group.layers)
        # A peer may say any number: nothing of that size is made.
        if len(covered) != self.num_layers or covered != list(range(len(covered))):
            raise ConfigError(
                "the groups must cover every layer exactly once",
                given=covered,
                allowed=f"0 to {self.num_layers - 1}",
            )

    def digest(self) -> bytes:
        """Return 32 bytes that are equal exactly when the identities are."""
        return _digest(self)

    def block_bytes(self, block_tokens: int) -> int:
        """Return the bytes that one block id of `block_tokens` tokens takes.

        Groups share memory: the id is a block of one group at a time, so the group with the most
        layers decides.

        Raises:
            ConfigError: the size of `kv_dtype` is not known.
        """
        require_one_of("kv_dtype", self.kv_dtype, tuple(DTYPE_BYTES))
        num_layers = max(len(group.layers) for group in self.groups)
        page_values = 2 * block_tokens * self.num_kv_heads * self.head_size
        return num_layers * page_values * DTYPE_BYTES[self.kv_dtype]


def identity_to_plain(identity: Identity) -> dict[str, Any]:
    """Return the identity as plain maps, lists and scalars (for JSON and CBOR)."""
    plain = asdict(identity)
    plain["groups"] = [_group_to_plain(group) for group in identity.groups]
    return plain


def _group_to_plain(group: GroupSpec) -> dict[str, Any]:
    plain: dict[str, Any] = {"kind": group.kind, "layers": list(group.layers)}
    setting = _SETTING_OF_KIND.get(group.kind)
    if setting is not None:
        plain[setting] = getattr(group, setting)
    return plain


def identity_from_plain(plain: dict[str, Any]) -> Identity:
    """Return the identity that `identity_to_plain` took apart.

    Raises:
        ConfigError: a field is missing, unknown or of the wrong kind.
    """
    try:
        groups = tuple(
            GroupSpec(**{**group, "layers": tuple(group["layers"])}) for group in plain["groups"]
        )
        return Identity(**{**plain, "groups": groups})
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "not an identity", given=str(error), allowed=list(Identity.__dataclass_fields__)
        ) from error


# Every fetch names its identity; a process knows few.
@lru_cache(maxsize=256)
def identity_to_cbor(identity: Identity) -> bytes:
    """Return the identity as canonical CBOR: equal bytes exactly for equal identities."""
    return cbor2.dumps(identity_to_plain(identity), canonical=True)


@lru_cache(maxsize=256)
def _digest(identity: Identity) -> bytes:
    return hashlib.sha256(identity_to_cbor(identity)).digest()


def identity_from_cbor(data: bytes) -> Identity:
    """Return the identity that `identity_to_cbor` wrote.

    Raises:
        BadInputError: not CBOR, or (ConfigError) not the fields of an identity.
    """
    try:
        plain: Any = cbor2.loads(data)
    except (cbor2.CBORDecodeError, ValueError) as error:
        raise BadInputError(
            "the identity is not CBOR", given=str(error), allowed="the CBOR of an identity"
        ) from error
    if not isinstance(plain, dict):
        raise BadInputError(
            "the identity is not a map", given=type(plain).__name__, allowed="a map of fields"
        )
    return identity_from_plain(plain)


def require_equal_identities(ours: Identity, theirs: Identity, *, who: str) -> None:
    """Refuse a peer whose bytes mean something else than ours.

    Raises:
        IdentityMismatchError: naming each differing field with the peer's value (`given`) and ours
            (`allowed`).
    """
    mine, other = identity_to_plain(ours), identity_to_plain(theirs)
    differing = [name for name in mine if mine[name] != other[name]]
    if differing:
        raise IdentityMismatchError(
            f"{who} has another identity",
            given={name: other[name] for name in differing},
            allowed={name: mine[name] for name in differing},
        )
