"""What a head is trained on: runs of the target over texts, and files in which they are kept."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from eaglegbv.drafters.training.data import Corpus, fill_rows, pack
from eaglegbv.drafters.training.unroll import TargetRun
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import write_whole

_ROWS_AT_ONCE = 1024
"""Hidden states whose logits over the whole vocabulary are held at once."""


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The target, and what a head reads of it.

    Attributes:
        model: The target, not trained.
        feature_layers: Layers whose inputs are the features; empty for the last hidden state.
        window: Tokens of a row.
    """

    model: PreTrainedModel
    feature_layers: tuple[int, ...]
    window: int

    @torch.no_grad()
    def run(self, corpus: Corpus, documents: Tensor, *, logits: bool = True) -> TargetRun:
        """Run the target over ``documents`` ``[rows, number]``, each row's laid end to end.

        Rows are cut at the window, and are no longer than the longest one needs. Without ``logits``
        the output layer is not run.
        """
        window = min(self.window, int(corpus.lengths[documents].sum(dim=1).max()))
        rows = pack(corpus, documents, window)
        model = self.model if logits else self.model.base_model
        out = model(input_ids=rows.token_ids, output_hidden_states=True, use_cache=False)
        final = out.hidden_states[-1]
        features = [out.hidden_states[i] for i in self.feature_layers] or [final]
        return TargetRun(
            token_ids=rows.token_ids,
            is_response=rows.is_response,
            features=torch.cat(features, dim=-1).float(),
            final_hidden=final,
            logits=out.logits if logits else None,
        )

    @property
    def output(self) -> Tensor:
        """The output layer, ``[vocab, target_hidden]``."""
        weight: Tensor = self.model.get_output_embeddings().get_parameter("weight")
        return weight

    @torch.no_grad()
    def log_z(self, final_hidden: Tensor) -> Tensor:
        """Return the logsumexp of the logits of last hidden states, ``[...]`` float32."""
        rows = final_hidden.flatten(0, -2).to(self.output.dtype).split(_ROWS_AT_ONCE)
        sums = [functional.linear(part, self.output).float().logsumexp(dim=-1) for part in rows]
        return torch.cat(sums).view(final_hidden.shape[:-1])

    def check_output_layer(self, run: TargetRun) -> None:
        """Check that the logits of ``run`` are the output layer's product.

        Raises:
            InvalidArgument: They are capped or scaled.
        """
        again = functional.linear(run.final_hidden, self.output)
        if run.logits is None or not torch.allclose(again, run.logits, rtol=1e-2, atol=1e-2):
            expected = "a target whose logits are its output layer's product, not capped"
            raise InvalidArgument("keep_runs", True, expected)


@dataclass(frozen=True, slots=True)
class KeptRuns:
    """Runs over texts, each made when it is first drawn and kept in files: a target reads once.

    Features and last hidden states are kept in bfloat16, ``2 * (F + target_hidden)`` bytes a token;
    logits are computed again from the latter, those of drafted tokens alone. A run that was killed
    continues with the files, and several runs may use them.

    Attributes:
        target: The target.
        corpus: Texts no longer than its window.
        rows: ``[rows, number]`` int64, the texts of each row, for :func:`pack`.
        features: ``[rows, window, F]`` bfloat16, on the CPU, as all that is kept.
        final_hidden: ``[rows, window, target_hidden]`` bfloat16.
        log_z: ``[rows, window]`` float32.
        done: ``[rows]`` uint8, 1 where a row is kept.
    """

    target: FrozenTarget
    corpus: Corpus
    rows: Tensor
    features: Tensor
    final_hidden: Tensor
    log_z: Tensor
    done: Tensor

    @classmethod
    def over(cls, target: FrozenTarget, corpus: Corpus, folder: Path, *, seed: int) -> Self:
        """Lay ``corpus`` out in rows, and open the files in ``folder``, or make them.

        Args:
            target: The target.
            corpus: Texts no longer than its window.
            folder: Folder of the files.
            seed: Seed of which texts share a row.

        Raises:
            InvalidArgument: The folder is of other texts or another target, or the target's logits
                are more than its output layer's product.
        """
        rows = fill_rows(corpus.lengths, target.window, seed)
        first = target.run(corpus, rows[:1])
        target.check_output_layer(first)
        folder.mkdir(parents=True, exist_ok=True)
        _claim(folder / "of.json", target, corpus, rows)
        shape = (len(rows), target.window)

        def kept(name: str, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            path, number = str(folder / name), math.prod(size)
            return torch.from_file(path, shared=True, size=number, dtype=dtype).view(size)

        return cls(
            target=target,
            corpus=corpus,
            rows=rows,
            features=kept("features", *shape, first.features.shape[-1]),
            final_hidden=kept("final_hidden", *shape, first.final_hidden.shape[-1]),
            log_z=kept("log_z", *shape, dtype=torch.float32),
            done=kept("done", len(rows), dtype=torch.uint8),
        )

    def draw(self, batch: int, seed: int) -> Tensor:
        """Draw ``[batch]`` rows, each at most once."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(len(self.rows), generator=generator)[:batch]

    def of(self, rows: Tensor) -> TargetRun:
        """Return the runs of ``rows`` ``[batch]`` int64, after making those not kept yet."""
        self.keep(rows[self.done[rows] == 0])
        device = self.corpus.lengths.device
        packed = pack(self.corpus, self.rows[rows.to(device)], self.target.window)
        return TargetRun(
            token_ids=packed.token_ids,
            is_response=packed.is_response,
            features=self.features[rows].to(device).float(),
            final_hidden=self.final_hidden[rows].to(device).float(),
            output=self.target.output,
            log_z=self.log_z[rows].to(device),
        )

    def keep(self, rows: Tensor) -> None:
        """Run the target over ``rows`` ``[number]`` int64, and keep the results."""
        if not len(rows):
            return
        documents = self.rows[rows.to(self.rows.device)]
        run = self.target.run(self.corpus, documents, logits=False)
        columns = slice(run.token_ids.shape[1])
        final_hidden = run.final_hidden.bfloat16()
        self.features[rows, columns] = run.features.bfloat16().cpu()
        self.final_hidden[rows, columns] = final_hidden.cpu()
        self.log_z[rows, columns] = self.target.log_z(final_hidden).cpu()
        self.done[rows] = 1


def _claim(path: Path, target: FrozenTarget, corpus: Corpus, rows: Tensor) -> None:
    """Say in ``path`` what the files beside it are of, or check that it says so already."""
    digest = hashlib.sha256(corpus.token_ids.cpu().numpy().tobytes())
    digest.update(rows.cpu().numpy().tobytes())
    own = {
        "target": target.model.name_or_path,
        "layers": list(target.feature_layers),
        "window": target.window,
        "texts": digest.hexdigest(),
    }
    if not path.exists():
        write_whole(path, json.dumps(own).encode())
    found = json.loads(path.read_text())
    if found != own:
        raise InvalidArgument("keep_runs", str(path.parent), f"the folder of {own}, not of {found}")
