from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from tests.builders import make_identity

from kvferry.cluster.client_staging import require_layers, require_writable
from kvferry.proto.errors import BadInputError

IDENTITY = make_identity(num_layers=2, num_kv_heads=3)
SHAPE = (2, 8, 3, 8)


def require(layers: object) -> None:
    """As a fetch does it."""
    require_layers(layers, IDENTITY, num_tokens=8, who="into")  # type: ignore[arg-type]
    require_writable(layers, who="into")  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [None, 5, torch.zeros(2, *SHAPE), {}, iter(())], ids=repr)
def test_what_is_no_sequence_of_tensors_is_refused_by_kind(layers: object) -> None:
    with pytest.raises(BadInputError, match="into must be a sequence of tensors") as caught:
        require(layers)
    assert caught.value.given == type(layers).__name__


def test_tensors_without_dense_bytes_are_refused_by_layer() -> None:
    with pytest.raises(BadInputError, match=r"into\[1\] has no dense bytes; .* on meta"):
        require([torch.zeros(SHAPE), torch.zeros(SHAPE, device="meta")])
    with pytest.raises(BadInputError, match=r"into\[0\] has no dense bytes; .*sparse_coo on cpu"):
        require([torch.zeros(SHAPE).to_sparse(), torch.zeros(SHAPE)])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inference_tensors_can_be_written_to_only_in_inference_mode(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    with torch.inference_mode():
        layers = [torch.zeros(SHAPE), torch.zeros(SHAPE)]
        require(layers)
        layers[0].copy_(torch.ones(SHAPE))
    with torch.no_grad(), pytest.raises(BadInputError, match=r"into\[0\] cannot be written to"):
        require(layers)
    with mode():
        require([torch.zeros(SHAPE).requires_grad_(), torch.zeros(SHAPE)])


@pytest.mark.parametrize(
    "layer",
    [
        torch.zeros(1, 8, 3, 8).expand(SHAPE),
        torch.zeros(2, 8, 1, 8).expand(SHAPE),
        torch.zeros(1000).as_strided(SHAPE, (9, 24, 8, 1)),
    ],
    ids=["one for K and V", "one for all heads", "overlap"],
)
def test_elements_that_share_memory_are_refused_by_layer(layer: torch.Tensor) -> None:
    with pytest.raises(BadInputError, match=r"elements of into\[1\] share memory") as caught:
        require([torch.zeros(SHAPE), layer])
    assert caught.value.given == f"strides {list(layer.stride())} of shape [2, 8, 3, 8]"


def test_one_tensor_for_two_layers_is_refused_naming_both() -> None:
    layer = torch.zeros(SHAPE)
    with pytest.raises(BadInputError, match=r"into\[1\] is the tensor of another .*into\[0\]"):
        require([layer, layer.view(SHAPE)])
    require_layers([layer, layer], IDENTITY, num_tokens=8, who="layers")


def test_views_of_one_large_tensor_are_taken_however_they_lie() -> None:
    require(list(torch.zeros(2, *SHAPE)))
    require(list(torch.zeros(2, 8, 2, 3, 8).unbind(dim=2)))
    require([torch.zeros(2, 3, 9, 8).transpose(1, 2)[:, :8] for _ in range(2)])
