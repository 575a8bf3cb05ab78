"""One Python value to one digest, by each of the four algorithms.

    algorithm     serialised with    digest      bytes
    sha256_cbor   canonical CBOR     SHA-256     32
    sha256        pickle             SHA-256     32
    xxhash_cbor   canonical CBOR     XXH3-128    16
    xxhash        pickle             XXH3-128    16

**Pickle depends on object identity**: a text that occurs twice is written twice when it is two
objects, and once plus a back reference when it is one. Two processes can therefore disagree about
equal values. `with_own_objects` takes that freedom away for the extra keys, so kvferry agrees with
itself; an engine that hashes with pickle may still differ from kvferry (and from itself). CBOR has
no such trap: use `sha256_cbor` wherever hashes are shared.
"""

import hashlib
import pickle
import sys
from collections.abc import Callable
from typing import Protocol

import cbor2
import xxhash

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.scheme import Algorithm


class Digest(Protocol):
    """A digest that takes its bytes in pieces, as hashlib and xxhash make them."""

    def copy(self) -> "Digest":
        """Return another one that has taken the same bytes."""
        ...

    def update(self, data: bytes, /) -> None:
        """Take more bytes."""
        ...

    def digest(self) -> bytes:
        """Return the digest of the bytes taken so far."""
        ...


# Pinned: the highest protocol of a future Python would change every hash.
_PICKLE_PROTOCOL = 5


def digest(algorithm: Algorithm, value: object) -> bytes:
    """Return the digest (32 or 16 bytes) of a value made of bytes, ints, texts, tuples and None.

    Raises:
        ConfigError: unknown algorithm.
        BadInputError: the value holds something that cannot be serialised.
    """
    try:
        serialise, start = _ALGORITHMS[algorithm]
    except (KeyError, TypeError):  # a list, say, cannot even be looked up
        raise ConfigError(
            "unknown hash algorithm", given=repr(algorithm), allowed=list(_ALGORITHMS)
        ) from None
    try:
        serialised = serialise(value)
    except (cbor2.CBOREncodeError, UnicodeEncodeError) as error:
        raise BadInputError(
            "a value that cannot be hashed",
            given=str(error),
            allowed="bytes, integers, texts that UTF-8 can encode, tuples of them, None",
        ) from error
    return start(serialised).digest()


def start_digest(algorithm: Algorithm, data: bytes) -> Digest:
    """Return the digest of a value of whose serialised form `data` is the beginning."""
    return _ALGORITHMS[algorithm][1](data)


def depends_on_identity(algorithm: Algorithm) -> bool:
    """Tell whether equal values can have different digests (the pickle algorithms)."""
    return _ALGORITHMS[algorithm][0] is _to_pickle


def with_own_objects(extra_keys: tuple[object, ...]) -> tuple[object, ...]:
    """Return equal extra keys in the one form in which pickle always writes them.

    Every text and digest is an object of its own; only the tag word in front of a tagged key is
    one object per word. That is how vLLM's keys look when all texts came off the wire.
    """
    return tuple(_own_key(key) for key in extra_keys)


def _own_key(key: object) -> object:
    if not isinstance(key, tuple):
        return _own_object(key)
    tag, *rest = key
    return (sys.intern(tag), *(_own_object(item) for item in rest))


def _own_object(item: object) -> object:
    # Decoding makes a new object each time (but for the empty text and single characters, of
    # which Python keeps one object each: still the same every time).
    if isinstance(item, str):
        return item.encode().decode()
    if isinstance(item, bytes):
        return bytes(bytearray(item))
    return item


def _to_cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _to_pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=_PICKLE_PROTOCOL)


_ALGORITHMS: dict[Algorithm, tuple[Callable[[object], bytes], Callable[[bytes], Digest]]] = {
    "sha256_cbor": (_to_cbor, hashlib.sha256),
    "sha256": (_to_pickle, hashlib.sha256),
    "xxhash_cbor": (_to_cbor, xxhash.xxh3_128),
    "xxhash": (_to_pickle, xxhash.xxh3_128),
}
