"""How weights lie in memory."""

import pytest
import torch
from torch import nn

from eaglegbv.matrix_layout import SideBySide, lay_out_for_few_rows


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.output(self.inner(self.embedding(token_ids)))
        return result


def test_only_strides_change_and_shared_weights_stay() -> None:
    model, token_ids = _Tied(), torch.arange(7)
    names = {name: id(weight) for name, weight in model.named_parameters()}
    before = model(token_ids)
    lay_out_for_few_rows(model)
    assert model.inner.weight.stride() == (1, 4)
    assert model.output.weight.stride() == (4, 1)
    assert model.output.weight is model.embedding.weight
    assert {name: id(weight) for name, weight in model.named_parameters()} == names
    torch.testing.assert_close(model(token_ids), before)


def test_other_types_keep_their_order() -> None:
    layer = nn.Linear(4, 3, dtype=torch.bfloat16)
    lay_out_for_few_rows(layer)
    assert layer.weight.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_keep_names_and_outputs(dtype: torch.dtype, bias: bool) -> None:
    module = nn.ModuleList(nn.Linear(5, size, bias=bias, dtype=dtype) for size in (3, 4, 2))
    together = SideBySide(*(layer for layer in module if isinstance(layer, nn.Linear)))
    x, state = (
        torch.randn(2, 5, dtype=dtype),
        {n: w.clone() for n, w in module.state_dict().items()},
    )
    before = together(x)
    together.join()
    for after, expected, layer in zip(together(x), before, module, strict=True):
        torch.testing.assert_close(after, expected)
        torch.testing.assert_close(layer(x), expected)
    assert module.state_dict().keys() == state.keys()
    assert all(torch.equal(w, state[n]) for n, w in module.state_dict().items())


def test_weights_loaded_after_joining_are_used() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 1)
    together, x = SideBySide(first, second), torch.randn(4, 3)
    together.join()
    first.load_state_dict(nn.Linear(3, 2).state_dict())
    torch.testing.assert_close(together(x)[0], first(x))
