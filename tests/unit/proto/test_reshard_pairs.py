"""Random pairs of layouts: the bytes after a plan equal a dense reference, each written once."""

from random import Random

import pytest
from tests.unit.proto.reshard_reference import check_pair, random_pair

PAIRS_EACH = 100
LONG_PAIRS_EACH = 1000


def check_pairs(seeds: range) -> None:
    for seed in seeds:
        pair = random_pair(Random(seed))
        try:
            check_pair(*pair)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {pair}: {error}") from error


@pytest.mark.parametrize("number", range(20))
def test_any_layout_becomes_any_other_and_each_byte_moves_once(number: int) -> None:
    check_pairs(range(number * PAIRS_EACH, (number + 1) * PAIRS_EACH))


@pytest.mark.long
@pytest.mark.parametrize("number", range(100))
def test_any_layout_becomes_any_other_in_100_000_pairs(number: int) -> None:
    first = 1_000_000 + number * LONG_PAIRS_EACH
    check_pairs(range(first, first + LONG_PAIRS_EACH))
