"""Logits that are scaled, capped or biased are those of the model, for whoever computes them."""

import pytest
import torch
from support.output_layers import FAMILIES, family

from eaglegbv.errors import ModelNotSupported
from eaglegbv.models.hf import HFTarget
from eaglegbv.output_layer import OutputLayer

VOCAB = 40
FACTS = {
    "llama": (1.0, None, False),
    "granite": (0.125, None, False),
    "cohere": (0.125, None, False),
    "gemma2": (1.0, 2.0, False),
    "phi": (1.0, None, True),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_it_computes_the_logits_of_the_model(name: str) -> None:
    model = family(name, VOCAB)
    tokens = torch.arange(12).view(2, 6)
    out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    state = out.hidden_states[-1]
    layer = OutputLayer.of(model)
    scale, softcap, biased = FACTS[name]
    assert (layer.scale, layer.softcap, layer.bias is not None) == (scale, softcap, biased)
    torch.testing.assert_close(layer(state), out.logits)
    some = torch.tensor([7, 3, 30])
    torch.testing.assert_close(layer.rows(some)(state), out.logits[..., some])
    served = HFTarget(family(name, VOCAB), max_slots=64).output_layer()
    served.prepare_products()
    torch.testing.assert_close(served(state), out.logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_same_of_a_model_in_half_precision(dtype: torch.dtype) -> None:
    found = {name: OutputLayer.of(family(name, VOCAB).to(dtype)) for name in FAMILIES}
    facts = {name: (o.scale, o.softcap, o.bias is not None) for name, o in found.items()}
    assert facts == FACTS


@pytest.mark.parametrize("fault", ["logits", "state", "weight"])
def test_what_it_cannot_compute_is_refused(fault: str) -> None:
    model = family("llama", VOCAB)
    if fault == "logits":
        model.register_forward_hook(lambda _m, _i, out: setattr(out, "logits", out.logits.abs()))
    elif fault == "state":
        model.lm_head.register_forward_pre_hook(lambda _m, inputs: (inputs[0] + 1,))
    else:
        model.get_output_embeddings = lambda: None
    with pytest.raises(ModelNotSupported, match="output layer"):
        OutputLayer.of(model)
