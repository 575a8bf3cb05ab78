"""What an event tells of the blocks of a request that became findable."""

from collections.abc import Iterable

from kvferry.coordinator.pool_events import StoredContent
from kvferry.coordinator.request_state import KnownContent
from kvferry.proto.extra_keys import block_extra_keys
from kvferry.proto.scheme import KeyFormat


def describe_run(
    content: KnownContent,
    key_format: KeyFormat,
    run: tuple[int, int],
    blocks: Iterable[tuple[int, int]],
) -> StoredContent:
    """Return the tokens `[start, end)` of a `run` and the extra keys of `blocks` in it.

    `blocks` are the token ranges of the stored blocks, in order.
    """
    extra = []
    previous_end = 0
    for start, end in blocks:
        extra.append(_extra_keys(content, key_format, start, end, previous_end))
        previous_end = end
    lora = content.keys.lora
    return StoredContent(
        tokens=tuple(content.tokens[run[0] : run[1]]),
        extra=tuple(extra) or None,
        lora_id=content.lora_id,
        lora_name=None if lora is None else lora.name,
    )


def _extra_keys(
    content: KnownContent, key_format: KeyFormat, start: int, end: int, previous_end: int
) -> tuple[object, ...] | None:
    found = block_extra_keys(key_format, content.keys, start, end)
    if key_format == "0.32":
        return None if found is None else tuple(_untagged(key) for key in found)
    # vLLM 0.17 counts an item that ended right before a block as part of it, unless the block
    # before it was told in the same event.
    touching = [
        item.identifier
        for item in content.keys.multimodal
        if item.end == start and start != previous_end
    ]
    if not touching:
        return found
    num_first = 0 if content.keys.lora is None else 1
    keys = found or ()
    return (*keys[:num_first], *touching, *keys[num_first:])


def _untagged(key: object) -> object:
    """Return a tagged key in the form that subscribers know: without its tag and its details."""
    if not isinstance(key, tuple):
        return key
    return key[1:] if key[0] == "mm" else key[1]
