"""What a prefix needs, told by positions of tokens: the model that the code is held against."""

from kvferry.proto.identity import GroupSpec


def first_needed_hash(group: GroupSpec, end: int, unit: int, hash_tokens: int) -> int:
    """By the tokens that the token after `end` hashes attends to, in blocks of `unit` hashes."""
    num_tokens, block_tokens = end * hash_tokens, unit * hash_tokens
    last = end - unit
    if group.kind == "full":
        return 0
    if group.kind == "mamba":
        return last
    if group.chunk_tokens is not None:
        seen = range(num_tokens // group.chunk_tokens * group.chunk_tokens, num_tokens)
        return seen.start // block_tokens * unit if seen else end
    assert group.window_tokens is not None
    seen = range(max(num_tokens - group.window_tokens + 1, 0), num_tokens)
    return min(seen.start // block_tokens * unit, last)
