"""Where vLLM's backends have the keys and values of a token, said once more in plain loops."""

import pytest
import torch

from kvferry.cluster.connectors.paged_tensors import of_accelerator, of_cpu
from kvferry.proto.errors import ConfigError

BLOCKS, TOKENS, HEADS, SIZE = 3, 8, 4, 6
CUT = {"block_tokens": TOKENS, "num_heads": HEADS, "head_size": SIZE}


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_on_a_cpu_the_keys_of_a_head_lie_by_value_and_its_values_by_token() -> None:
    tensor = numbered(BLOCKS, HEADS, TOKENS, 2 * SIZE)
    keys, values = of_cpu(tensor, **CUT)
    flat = tensor.view(BLOCKS, HEADS, -1)
    for token in range(TOKENS):
        for value in range(SIZE):
            at = value * TOKENS + token
            assert torch.equal(keys[:, token, :, value], flat[:, :, at])
            at = TOKENS * SIZE + token * SIZE + value
            assert torch.equal(values[:, token, :, value], flat[:, :, at])


def test_the_three_orders_of_accelerators_are_told_by_their_shape() -> None:
    tensor = numbered(BLOCKS, HEADS, TOKENS, 2 * SIZE)
    keys, values = of_accelerator(tensor, **CUT)
    assert torch.equal(keys[1, 2, 3], tensor[1, 3, 2, :SIZE])
    assert torch.equal(values[1, 2, 3], tensor[1, 3, 2, SIZE:])
    tensor = numbered(2, BLOCKS, TOKENS, HEADS, SIZE)
    keys, values = of_accelerator(tensor, **CUT)
    assert torch.equal(keys, tensor[0])
    assert torch.equal(values, tensor[1])
    tensor = numbered(BLOCKS, 2, TOKENS, HEADS, SIZE)
    keys, values = of_accelerator(tensor, **CUT)
    assert torch.equal(keys, tensor[:, 0])
    assert torch.equal(values, tensor[:, 1])


@pytest.mark.parametrize(
    "shape",
    [(2, 2, TOKENS, HEADS, SIZE), (BLOCKS, TOKENS, HEADS, 2 * SIZE), (BLOCKS, TOKENS, 2 * SIZE)],
)
def test_another_shape_is_refused_with_those_that_are_known(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="an order that is not known"):
        of_accelerator(torch.zeros(shape), **CUT)
    with pytest.raises(ConfigError, match="an order that is not known"):
        of_cpu(torch.zeros(shape), **CUT)


def test_tiles_of_bfloat16_and_gaps_on_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="may lie in tiles"):
        of_cpu(torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE, dtype=torch.bfloat16), **CUT)
    with pytest.raises(ConfigError, match="an order that is not known"):
        of_cpu(torch.zeros(2 * BLOCKS, HEADS, TOKENS, 2 * SIZE)[::2], **CUT)
