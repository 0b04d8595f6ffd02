"""How weights lie in memory."""

import torch
from eaglegbv.matrix_layout import lay_out_for_few_rows
from torch import nn


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
