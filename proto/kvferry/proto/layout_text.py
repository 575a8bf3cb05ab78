"""A layout as text, for the command line, configuration and registration.

    pcp=2,dcp=2,interleave=4,block_tokens=16

Any of the fields of `Layout`, in any order, separated by commas; `stage_layers` are joined by "+".
"""

from dataclasses import fields

from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout

DEFAULT_BLOCK_TOKENS = 16

_NAMES = tuple(field.name for field in fields(Layout))
_TEXTS = ("kind", "profile", "memory")


def parse_layout(text: str, *, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> Layout:
    """Return the layout that a text describes; what it leaves out has its default.

    Args:
        text: `name=value`, separated by commas; the empty text is one rank.
        block_tokens: the default of the field of that name.

    Raises:
        ConfigError: an unknown or repeated name, a value that is no number where one must be, or a
            layout that cannot be.
    """
    values: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _NAMES:
            raise ConfigError(
                "a layout is name=value, separated by commas", given=part, allowed=list(_NAMES)
            )
        if name in values:
            raise ConfigError("a layout names a field twice", given=part, allowed="once")
        values[name] = _value(name, value)
    return Layout(**{"block_tokens": block_tokens, **values})  # type: ignore[arg-type]


def _value(name: str, text: str) -> object:
    if name in _TEXTS:
        return text
    if name == "stage_layers":
        return tuple(_number(name, piece) for piece in text.split("+"))
    return _number(name, text)


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise ConfigError(f"{name} must be an integer", given=text, allowed=">= 1")
    return int(text)


def layout_text(layout: Layout) -> str:
    """Return the text of a layout: `block_tokens`, and every field that is not its default."""
    default = Layout(block_tokens=layout.block_tokens)
    named = [name for name in _NAMES if getattr(layout, name) != getattr(default, name)]
    return ",".join(f"{name}={_shown(getattr(layout, name))}" for name in ["block_tokens", *named])


def _shown(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
