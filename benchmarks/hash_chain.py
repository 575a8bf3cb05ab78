"""Time the hash chain against the naive way to compute the same bytes.

Prints one JSON object `{machine, rows}`; a row is `{name, unit, value, baseline, baseline_value,
ratio, better}` with `ratio = value / baseline_value`, the median over interleaved pairs, so that
whatever else the machine does falls on both sides. The baseline always starts from a list.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import cbor2
import numpy as np

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


def elapsed_ns(work: Callable[[], object]) -> int:
    """Return how many nanoseconds one call takes."""
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def measure(
    name: str, ours: Callable[[], object], naive: Callable[[], object], *, num_pairs: int
) -> dict[str, Any]:
    """Return the row of one name: medians of `num_pairs` interleaved pairs, in ns per block."""
    num_blocks = REQUEST_TOKENS // HASH_BLOCK_TOKENS
    pairs = [(elapsed_ns(ours), elapsed_ns(naive)) for _ in range(num_pairs)]
    return {
        "name": name,
        "unit": "ns",
        "value": statistics.median(mine for mine, _ in pairs) / num_blocks,
        "baseline": "naive",
        "baseline_value": statistics.median(other for _, other in pairs) / num_blocks,
        "ratio": statistics.median(mine / other for mine, other in pairs),
        "better": "lower",
    }


def main() -> None:
    """Run all rows and print the object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=31, help="interleaved pairs per row")
    num_pairs = parser.parse_args().pairs

    scheme = make_scheme(hash_block_tokens=HASH_BLOCK_TOKENS)
    array = np.random.default_rng(0).integers(VOCABULARY, size=REQUEST_TOKENS, dtype=np.uint32)
    tokens: list[int] = array.tolist()
    if (
        not hash_tokens(scheme, tokens)
        == hash_tokens(scheme, array)
        == naive_hashes(scheme, tokens)
    ):
        raise SystemExit("the hashes differ from the naive ones; nothing was timed")

    def naive() -> object:
        return naive_hashes(scheme, tokens)

    rows = [
        measure("hash_block@list", lambda: hash_tokens(scheme, tokens), naive, num_pairs=num_pairs),
        measure("hash_block@array", lambda: hash_tokens(scheme, array), naive, num_pairs=num_pairs),
    ]
    machine = {
        "system": platform.system(),
        "processor": platform.machine(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "cbor2": importlib.metadata.version("cbor2"),
    }
    print(json.dumps({"machine": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
