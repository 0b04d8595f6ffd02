"""Which of transformers' decoder families the engine runs: each made small, with random weights.

    python tools/families.py            # write docs/results/tables/families.toml, in some minutes
    python tools/families.py qwen3 gpt2 # print these families alone

A family runs if it passes the check on loading, and if drafts looked up in the text, judged in
trees, lead to the text of plain decoding at temperature 0.
"""

import json
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eaglegbv import Plan, SamplingParams
from eaglegbv.config import PLAIN, EngineConfig
from eaglegbv.engine import Engine
from eaglegbv.loading import load_pair
from eaglegbv.models.native import unknown_of

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "results" / "tables" / "families.toml"
VOCAB, LAYERS, SECONDS = 96, 4, 60
SIZES = {
    64: "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size rnn_width lru_width",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads "
    "n_head n_heads num_heads decoder_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts num_shared_experts",  # four of each
    2: "num_key_value_heads multi_query_group_num num_experts_per_tok moe_topk moe_k",
    16: "head_dim attention_head_size kv_channels v_head_dim qk_rope_head_dim qk_nope_head_dim",
    32: "kv_lora_rank q_lora_rank moe_intermediate_size shared_expert_intermediate_size",
    96: "intermediate_size n_inner ffn_dim d_ff decoder_ffn_dim ffn_hidden_size",
    256: "max_position_embeddings n_positions n_ctx max_sequence_length seq_length",
    1: "n_group topk_group n_shared_experts",
    VOCAB: "vocab_size vocab_size_per_layer_input",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}


class TooLong(BaseException):
    """A family takes longer than SECONDS; what the engine makes of errors leaves it alone."""


def make_small(config: Any) -> None:
    """Set the sizes of a configuration, and of those within it, to small ones."""
    for name, value in config.to_dict().items():
        inside = getattr(config, name) if isinstance(value, dict) else None
        if isinstance(inside, transformers.PreTrainedConfig):
            make_small(inside)
        elif name in SMALL and isinstance(value, int):
            setattr(config, name, SMALL[name])
        elif name in ("layer_types", "mlp_layer_types") and value:
            setattr(config, name, value[:LAYERS])
        elif name.endswith("_token_id") and isinstance(value, int | list):
            setattr(config, name, 0)


def outcome(family: str, folder: str) -> tuple[str, str]:
    """Return whether a family runs, and how or why not."""
    try:
        config = AutoConfig.for_model(family)
        make_small(config)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"
    try:
        pair = load_pair(folder, "ngram", slots=2_048, dtype=torch.float32, device="cpu")
        engine = Engine(pair.target, pair.drafter, EngineConfig(kv_slots=2_048))
        params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 2
        prompts = [[5, 6, 7, 5, 6, 7, 5], [11, 3, 11, 3, 11]]
        trees = Plan(verifier="target_only", draft_sampling="fixed", paths=2, depth=3)
        texts = [
            [request.token_ids for request in engine.run(prompts, params, plan)]
            for plan in (trees, PLAIN)
        ]
    except Exception as error:
        return "refused", f"{type(error).__name__}: {error}"
    if texts[0] != texts[1]:
        return "wrong", "trees change the text"
    native = unknown_of(AutoConfig.from_pretrained(folder)) is None
    return "runs", "natively on a CPU" if native else "through transformers"


def outcomes(families: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield every family with what came of it."""

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    for family in families:
        signal.alarm(SECONDS)
        try:
            with tempfile.TemporaryDirectory() as folder:
                kind, why = outcome(family, folder)
        except TooLong:
            kind, why = "not seen", f"more than {SECONDS} s"
        finally:
            signal.alarm(0)
        print(f"{family}: {kind}: {why.splitlines()[0][:200]}", flush=True)
        yield family, kind, why.splitlines()[0]


def reason_of(kind: str, why: str) -> str:
    """Return in words, without a family's own names, how or why not a family runs."""
    if kind == "not seen":
        return why
    if kind == "not made":
        return "this command's small sizes do not fit its configuration"
    expected = re.search(r"expected (.*?)(?: in each of| \(|, off by|$)", why)
    return why if kind == "runs" or expected is None else f"expected {expected[1]}"


def table(found: list[tuple[str, str, str]]) -> str:
    """Return the table, families by what came of them."""
    groups: dict[str, list[str]] = {}
    for family, kind, why in found:
        groups.setdefault(f"{kind}: {reason_of(kind, why)}", []).append(family)
    ranked = sorted(groups.items(), key=lambda group: (not group[0].startswith("runs"), group[0]))
    rows = [f"  {json.dumps([kind, str(len(names)), ', '.join(names)])}," for kind, names in ranked]
    version = f"transformers {transformers.__version__}, PyTorch {torch.__version__}, float32, CPU"
    return "\n".join(
        [
            "[families]",
            'command = "python tools/families.py"',
            f'measured = "{len(found)} families tried, four layers each; {version}"',
            "words = true",
            'headings = ["outcome", "families", "which"]',
            "rows = [",
            *rows,
            "]\n",
        ]
    )


def main() -> None:
    """Try the families that are named, or all, and write the table of all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    named = sys.argv[1:]
    found = list(outcomes(named or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
    if not named:
        TABLE.write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
