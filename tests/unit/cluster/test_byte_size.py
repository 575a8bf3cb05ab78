import pytest

from kvferry.cluster.byte_size import parse_bytes
from kvferry.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1000000", 1_000_000),
        ("7B", 7),
        ("512MiB", 512 * 1024**2),
        ("2 GB", 2_000_000_000),
        ("1.5KiB", 1536),
        ("0.0001kB", 0),
        ("3TiB", 3 * 1024**4),
    ],
)
def test_a_number_and_a_unit_are_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1Gib", "1m", "-1B", "1e9", "1_000", "1  B", "1.B"])
def test_what_is_no_size_is_refused_with_the_units_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size in bytes") as refused:
        parse_bytes(text)
    assert refused.value.given == text
    assert "KiB, MiB, GiB, TiB" in refused.value.allowed
