import pytest

from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout


def test_one_rank_holds_whole_blocks() -> None:
    layout = Layout(block_tokens=16)
    assert layout.num_ranks == 1
    assert layout.virtual_block_tokens == 16


@pytest.mark.parametrize("block_tokens", [0, -16, True, 16.0, "16"])
def test_a_block_size_that_is_no_positive_integer_is_refused(block_tokens: object) -> None:
    with pytest.raises(ConfigError, match="block_tokens must be an integer") as caught:
        Layout(block_tokens=block_tokens)  # type: ignore[arg-type]
    assert caught.value.given == repr(block_tokens)
