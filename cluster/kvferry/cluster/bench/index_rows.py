"""The location index against one dict lookup per block, and how fast it takes events."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvferry.cluster.bench.core_adapter import GROUP, removed_event, stored_event
from kvferry.cluster.bench.rows import Row, elapsed_ns, measure_alone, measure_pairs
from kvferry.coordinator.location_index import LocationIndex
from kvferry.coordinator.pool_events import PoolEvent
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockHash, InstanceId

PREFIX_BLOCKS = 256
_IDENTITY = b"identity"
_OWN_BLOCKS = 64
_REPEATS = 8
_INGEST_INSTANCES = 64
_INGEST_PROMPTS = 4


def locate_rows(seconds: float) -> Iterator[Row]:
    """Yield `locate_block@1`, `@64` and `@1024`: ns per block of a prefix of 256 blocks.

    Of so many instances a quarter each holds 256, 192, 128 and 64 blocks of the prefix (the first
    one all of it), and each holds blocks of its own. The work ends with the name of one that holds
    the most.
    """
    prefix = _hashes("prefix", PREFIX_BLOCKS)
    for num_instances in (1, 64, 1024):
        index = _filled_index(num_instances, prefix)
        known = dict.fromkeys(_hashes("other", PREFIX_BLOCKS) + prefix, 0)
        yield measure_pairs(
            f"locate_block@{num_instances}",
            partial(_ns_per_block, partial(_locate, index, prefix)),
            "dict",
            partial(_ns_per_block, partial(_look_up_each, known, prefix)),
            unit="ns",
            seconds=seconds,
        )


def ingest_rows(seconds: float) -> Iterator[Row]:
    """Yield `ingest_event`: stored and removed blocks per second, by 64 instances.

    All instances store the same prompts of 256 blocks, an event a prompt, and drop them again, last
    block first, an event a prompt too.
    """
    prompts = [_hashes(f"prompt {i}", PREFIX_BLOCKS) for i in range(_INGEST_PROMPTS)]
    stored = [stored_event(prompt) for prompt in prompts]
    removed = [removed_event(prompt[::-1]) for prompt in prompts]
    num_events = 2 * _INGEST_INSTANCES * _INGEST_PROMPTS * PREFIX_BLOCKS

    def events_per_s() -> float:
        index = LocationIndex()
        names = [_name(i) for i in range(_INGEST_INSTANCES)]
        for name in names:
            index.join(name, _IDENTITY)

        def ingest() -> None:
            batches: tuple[Sequence[PoolEvent], ...] = (stored, removed)
            for events in batches:
                for name in names:
                    index.apply(name, events)

        return num_events / (elapsed_ns(ingest) * 1e-9)

    yield measure_alone("ingest_event", events_per_s, unit="1/s", better="higher", seconds=seconds)


def _filled_index(num_instances: int, prefix: Sequence[BlockHash]) -> LocationIndex:
    index = LocationIndex()
    for i in range(num_instances):
        held = prefix[: PREFIX_BLOCKS - PREFIX_BLOCKS // 4 * (i % 4)]
        index.join(_name(i), _IDENTITY)
        index.apply(_name(i), [stored_event(held), stored_event(_hashes(f"own {i}", _OWN_BLOCKS))])
    best, num_blocks = next(index.longest_prefixes(_IDENTITY, prefix, GROUP).longest_first())
    if (best, num_blocks) != (_name(0), PREFIX_BLOCKS):
        raise InvariantError("not the longest prefix", given=[best, num_blocks])
    return index


def _locate(index: LocationIndex, prefix: Sequence[BlockHash]) -> InstanceId:
    best, _ = next(index.longest_prefixes(_IDENTITY, prefix, GROUP).longest_first())
    return best


def _look_up_each(known: dict[BlockHash, int], prefix: Sequence[BlockHash]) -> None:
    for block_hash in prefix:
        known[block_hash]


def _ns_per_block(work: Callable[[], object]) -> float:
    def repeated() -> None:
        for _ in range(_REPEATS):
            work()

    return elapsed_ns(repeated) / (_REPEATS * PREFIX_BLOCKS)


def _hashes(text: str, count: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(f"{text} {i}".encode()).digest()) for i in range(count)]


def _name(number: int) -> InstanceId:
    return InstanceId(f"instance-{number}")
