import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.drafting import TokenSession

from eaglegbv.config import Plan
from eaglegbv.drafters.tabular import LookupTable, TabularDrafter
from eaglegbv.errors import DrafterMismatch
from eaglegbv.tree import DraftSampling

VOCAB = 6


def sparse(tmp_path):
    """A table of two followers each, padded, saved."""
    ids = torch.zeros((VOCAB + 1, 3), dtype=torch.int64)
    ids[:, 1] = torch.arange(VOCAB + 1) % VOCAB
    log_probs = torch.full((VOCAB + 1, 3), -torch.inf)
    log_probs[:, 0], log_probs[:, 1] = np.log(0.25), np.log(0.75)
    LookupTable(VOCAB, 1, ids, log_probs).save(tmp_path, note="kept")
    return tmp_path


def test_a_saved_table_is_read_again_and_padding_has_no_mass(tmp_path):
    table = LookupTable.load(sparse(tmp_path), vocab_size=VOCAB)
    assert json.loads((tmp_path / "config.json").read_text())["note"] == "kept"
    probs = table.logits([3]).exp()[0]
    torch.testing.assert_close(probs, torch.tensor([0.25, 0, 0, 0.75, 0, 0]))
    session = TokenSession(TabularDrafter(table))
    request = session.start([1], 3, Plan(paths=4, depth=2, draft_width=VOCAB))
    tree = session.draft([request], DraftSampling.WOR)
    assert sorted(tree.token_ids[0, tree.depth[0] == 1].tolist()) == [0, 3]


def test_a_table_that_does_not_fit_is_refused_by_name(tmp_path):
    with pytest.raises(DrafterMismatch, match="vocab_size=6: expected the target's, 7"):
        LookupTable.load(sparse(tmp_path), vocab_size=7)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    for change, message in (
        ({"ids": tensors["ids"] + 1}, r"^ids=6: expected ids in \[0, 6\)"),
        ({"ids": tensors["ids"].long()}, "^ids=torch.int64: expected a tensor of torch.int32"),
        ({"ids": tensors["ids"][:-1].clone()}, r"^ids=\[6, 3\]: expected 7 rows"),
        ({"log_probs": tensors["log_probs"][:, :1].clone()}, r"^log_probs=\[7, 1\]"),
        ({"log_probs": tensors["log_probs"] * torch.nan}, "^log_probs='no finite entry'"),
    ):
        save_file(tensors | change, weights)
        with pytest.raises(DrafterMismatch, match=message):
            LookupTable.load(tmp_path, vocab_size=VOCAB)
    save_file({"ids": tensors["ids"]}, weights)
    with pytest.raises(DrafterMismatch, match=r"^log_probs=None"):
        LookupTable.load(tmp_path, vocab_size=VOCAB)
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(DrafterMismatch, match="a complete safetensors file"):
        LookupTable.load(tmp_path, vocab_size=VOCAB)
    config = {"model_type": "eaglegbv-tabular", "vocab_size": VOCAB, "order": 0}
    save_file(tensors, weights)
    for content, message in (
        (config, "key order=0"),
        ([config], "config.json': expected a JSON object"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(DrafterMismatch, match=message):
            LookupTable.load(tmp_path, vocab_size=VOCAB)
