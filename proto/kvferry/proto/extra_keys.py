"""What besides the tokens decides a block's content, and the extra keys that say so.

| source        | key format 0.32 (tagged)        | key format 0.17 (flat)    | in which blocks |
|---------------|---------------------------------|---------------------------|-----------------|
| adapter       | `("lora", name, path)`          | `name`                    | all             |
| with version  | `("lora", name, path, version)` | `("lora", name, version)` | all             |
| multimodal    | `("mm", identifier, position)`  | `identifier`              | it overlaps     |
| salt          | `("cache_salt", salt)`          | `salt`                    | the first       |
| prompt embeds | `("prompt_embeds", sha256)`     | `sha256`                  | all             |

In this order; a block without any has None. `position` is the item's offset counted from the
block's start (negative if it began earlier). Unversioned keys are bit-identical to vLLM's. A
versioned adapter's key is longer (0.32) or a tuple where vLLM has a text (0.17), so it equals no
key without a version, and an adapter replaced in place under its name is never taken for the old
one.

**Prefer 0.32.** The flat format confuses an adapter named like a salt, and loses the position of
an image in its block. See `block_extra_keys` for its dependence on how the tokens arrived.
"""

import hashlib
import reprlib
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from kvferry.proto.errors import BadInputError
from kvferry.proto.scheme import KeyFormat


def _require_text(value: object, what: str, *, may_be_empty: bool = False) -> None:
    if type(value) is str and (value or may_be_empty):
        try:
            value.encode()
        except UnicodeEncodeError:
            pass
        else:
            return
    raise BadInputError(
        f"{what} must be a text", given=repr(value), allowed="a text that UTF-8 can encode"
    )


def _require_kind(value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise BadInputError(
            f"{what} must be a {kind.__name__}", given=reprlib.repr(value), allowed=kind.__name__
        )


def _require_int(value: object, what: str, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise BadInputError(f"{what} must be an integer", given=repr(value), allowed=f">= {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraKey:
    """A LoRA adapter. `version` is its content digest or the operator's own version text.

    With `version` empty the adapter is told apart as vLLM does it: by name (0.17) or name and
    path (0.32). Whoever can replace an adapter in place must give a version.

    Raises:
        BadInputError: a field is no text that UTF-8 can encode, or the name is empty.
    """

    name: str
    path: str
    version: str = ""

    def __post_init__(self) -> None:
        _require_text(self.name, "the name of an adapter")
        _require_text(self.path, "the path of an adapter", may_be_empty=True)
        _require_text(self.version, "the version of an adapter", may_be_empty=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalItem:
    """An image, a sound or the like in place of tokens `[offset, offset + length)`.

    `identifier` is the digest of its whole content (already specific to the adapter if the
    adapter changes its encoding). `offset` and `length` are in tokens.

    Raises:
        BadInputError: no identifier, a negative offset, a length below 1, or another type.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        _require_text(self.identifier, "the identifier of a multimodal item")
        _require_int(self.offset, "the offset of a multimodal item", least=0)
        _require_int(self.length, "the length of a multimodal item", least=1)

    @property
    def end(self) -> int:
        """Position of the first token after the item."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbeds:
    """Embeddings in place of a prompt's tokens: the raw bytes, token after token.

    The tokens of such a prompt are all hashed as id 0.

    Raises:
        BadInputError: `raw` is not bytes of whole tokens, or `bytes_per_token` is below 1.
    """

    raw: bytes
    bytes_per_token: int

    def __post_init__(self) -> None:
        _require_int(self.bytes_per_token, "bytes_per_token of prompt embeds", least=1)
        if type(self.raw) is not bytes or len(self.raw) % self.bytes_per_token:
            size = len(self.raw) if type(self.raw) is bytes else type(self.raw).__name__
            raise BadInputError(
                "raw prompt embeds must be bytes, whole tokens of them",
                given=size,
                allowed=f"bytes, a multiple of {self.bytes_per_token} of them",
            )

    def digest(self, start_token: int, end_token: int) -> bytes:
        """Return the SHA-256 (32 bytes) of what the tokens `[start_token, end_token)` hold.

        Tokens after the prompt hold nothing.
        """
        first, last = start_token * self.bytes_per_token, end_token * self.bytes_per_token
        return hashlib.sha256(self.raw[first:last]).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKeys:
    """Everything besides the tokens that a request's blocks depend on.

    `multimodal` is ordered by offset, without overlaps. `salt` keeps tenants apart: None shares
    with everybody, and an empty text is refused, as it would silently do the same.

    Raises:
        BadInputError: a field of another kind, an empty salt, or items out of order.
    """

    lora: LoraKey | None = None
    salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    prompt_embeds: PromptEmbeds | None = None

    def __post_init__(self) -> None:
        if self.salt is not None:
            _require_text(self.salt, "a salt")
        if self.lora is not None:
            _require_kind(self.lora, LoraKey, "the adapter")
        if self.prompt_embeds is not None:
            _require_kind(self.prompt_embeds, PromptEmbeds, "prompt embeds")
        _require_kind(self.multimodal, tuple, "the multimodal items")
        for item in self.multimodal:
            _require_kind(item, MultimodalItem, "a multimodal item")
        for before, after in pairwise(self.multimodal):
            if after.offset < before.end:
                raise BadInputError(
                    "multimodal items must be ordered by offset and must not overlap",
                    given=[[item.identifier, item.offset, item.length] for item in (before, after)],
                    allowed=f"an offset of at least {before.end} for {after.identifier}",
                )


NO_KEYS = RequestKeys()
"""A request that depends on nothing but its tokens."""


def require_keys(keys: object) -> None:
    """Refuse what is no `RequestKeys`.

    Raises:
        BadInputError: naming what was given.
    """
    _require_kind(keys, RequestKeys, "the keys of a request")


def block_extra_keys(
    key_format: KeyFormat,
    keys: RequestKeys,
    start_token: int,
    end_token: int,
    *,
    resumed_at: int = 0,
) -> tuple[object, ...] | None:
    """Return the extra keys of the block of tokens `[start_token, end_token)`, None if it has none.

    `resumed_at` is the token at which this pass of hashing started: 0 for the pass over the
    prompt, later for each pass over tokens that came after it. Only format 0.17 depends on it,
    because vLLM 0.17 does: a later pass sees the last multimodal item only, and counts it as part
    of the pass's first block even if it ended right before. In format 0.32 the keys of a block
    depend on the block alone: if a later pass saw the last item only, prompts that differ in an
    earlier item of their partly filled last block would get one hash.

    Raises:
        BadInputError: `keys` is no `RequestKeys`.
    """
    require_keys(keys)
    lora = [] if keys.lora is None else [_lora_key(key_format, keys.lora)]
    items = _overlapping(keys.multimodal, start_token, end_token)
    if key_format == "0.17" and resumed_at:
        items = _seen_by_later_pass(keys.multimodal, start_token, end_token, resumed_at)
    found: list[object] = lora + [_item_key(key_format, item, start_token) for item in items]
    if keys.salt is not None and start_token == 0:
        found.append(_tagged(key_format, "cache_salt", keys.salt))
    if keys.prompt_embeds is not None:
        content = keys.prompt_embeds.digest(start_token, end_token)
        found.append(_tagged(key_format, "prompt_embeds", content))
    return tuple(found) or None


def _tagged(key_format: KeyFormat, tag: str, value: object) -> object:
    return (tag, value) if key_format == "0.32" else value


def _lora_key(key_format: KeyFormat, lora: LoraKey) -> object:
    version = (lora.version,) if lora.version else ()
    if key_format == "0.32":
        return ("lora", lora.name, lora.path, *version)
    return ("lora", lora.name, *version) if version else lora.name


def _item_key(key_format: KeyFormat, item: MultimodalItem, start_token: int) -> object:
    if key_format == "0.32":
        return ("mm", item.identifier, item.offset - start_token)
    return item.identifier


def _overlapping(
    items: tuple[MultimodalItem, ...], start_token: int, end_token: int
) -> list[MultimodalItem]:
    first = bisect_right(items, start_token, key=lambda item: item.end)
    found = []
    for item in items[first:]:
        if item.offset >= end_token:
            break
        found.append(item)
    return found


def _seen_by_later_pass(
    items: tuple[MultimodalItem, ...], start_token: int, end_token: int, resumed_at: int
) -> list[MultimodalItem]:
    last = items[-1:]
    if last and start_token == resumed_at == last[0].end:
        return list(last)
    return _overlapping(last, start_token, end_token)
