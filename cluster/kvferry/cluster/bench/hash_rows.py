"""The hash chain against the naive way to compute the same bytes."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import cbor2
import numpy as np

from kvferry.cluster.bench.rows import Row, elapsed_ns, measure_pairs
from kvferry.proto.errors import InvariantError
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import BlockHash
from kvferry.proto.scheme import HashScheme

REQUEST_TOKENS = 4096
HASH_BLOCK_TOKENS = 16
VOCABULARY = 128_000


def naive_hashes(scheme: HashScheme, tokens: Sequence[int]) -> tuple[BlockHash, ...]:
    """Return the chain of the full blocks of `tokens`, each encoded as a whole by cbor2."""
    parent, hashes = scheme.none_hash, []
    for start in range(0, len(tokens), scheme.hash_block_tokens):
        block = tuple(tokens[start : start + scheme.hash_block_tokens])
        encoded = cbor2.dumps((parent, block, None), canonical=True)
        parent = hashlib.sha256(encoded).digest()
        hashes.append(BlockHash(parent))
    return tuple(hashes)


def hash_rows(seconds: float) -> Iterator[Row]:
    """Yield `hash_block@list` and `hash_block@array` (uint32), in ns per block.

    The baseline always starts from a list.

    Raises:
        InvariantError: the hashes differ; nothing is timed then.
    """
    scheme = make_scheme(hash_block_tokens=HASH_BLOCK_TOKENS)
    array = np.random.default_rng(0).integers(VOCABULARY, size=REQUEST_TOKENS, dtype=np.uint32)
    tokens: list[int] = array.tolist()
    expected = naive_hashes(scheme, tokens)
    for form in (tokens, array):
        if hash_tokens(scheme, form) != expected:
            raise InvariantError("the hashes differ from the naive ones", given=type(form).__name__)

    def ns_per_block(hash_all: Callable[[], object]) -> float:
        return elapsed_ns(hash_all) / len(expected)

    for name, form in (("list", tokens), ("array", array)):
        yield measure_pairs(
            f"hash_block@{name}",
            partial(ns_per_block, partial(hash_tokens, scheme, form)),
            "naive",
            partial(ns_per_block, partial(naive_hashes, scheme, tokens)),
            unit="ns",
            seconds=seconds,
        )
