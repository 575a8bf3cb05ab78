"""Where vLLM's backends have the keys and values of a token, said once more in plain loops."""

import numpy as np
import pytest
import torch

from kvferry.cluster.connectors.paged_tensors import PagedTensors, of_accelerator, of_cpu
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


@pytest.mark.parametrize("method", ["_put_on_host", "_put_on_device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_ids", [(3, 4, 5), (2, 1, 0), (4, 0, 3)])
@pytest.mark.parametrize("source_ids", [range(2, 8), range(5, -1, -1), (7, 1, 2, 0, 4, 5)])
def test_blocks_get_their_tokens_wherever_either_side_has_them(
    source_ids: range | tuple[int, ...],
    block_ids: tuple[int, ...],
    dtype: torch.dtype,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What only a GPU takes is run here with host tensors.
    monkeypatch.setattr(PagedTensors, "_put_on_host", getattr(PagedTensors, method))
    values = np.random.default_rng(0).integers(
        0, 100, (2, 8, TOKENS // 2, HEADS, SIZE * dtype.itemsize), dtype=np.uint8
    )
    values.flags.writeable = False
    tensor = torch.zeros(6, HEADS, TOKENS, 2 * SIZE).to(dtype)
    layer = of_accelerator(tensor, **CUT)
    PagedTensors([layer]).write([(values[0], values[1])], source_ids, block_ids)
    given = torch.from_numpy(values.copy()).view(dtype)
    for side, blocks in zip(layer, given, strict=True):
        for index, block_id in enumerate(block_ids):
            halves = [blocks[source_ids[2 * index + half]] for half in (0, 1)]
            assert torch.equal(side[block_id].float(), torch.cat(halves).float())
        for block_id in {*range(6)} - {*block_ids}:
            assert not side[block_id].float().any()
