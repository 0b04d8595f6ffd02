"""Answers the target itself writes: what a drafter will be asked to continue."""

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from eaglegbv.drafters.training.data import Corpus, Document, draw_documents, join_documents


def regenerate(
    model: PreTrainedModel,
    corpus: Corpus,
    weights: Tensor,
    number: int,
    *,
    max_prompt: int,
    max_new_tokens: int,
    batch: int,
    seed: int,
) -> Corpus:
    """Let ``model`` answer prompts of ``corpus`` at temperature 1.

    A prompt is a document up to one of its responses, chosen at random. Plain texts have none.

    Args:
        model: The target.
        corpus: Documents to take prompts from.
        weights: ``[documents]`` weights of the documents.
        number: Prompts to draw; those longer than ``max_prompt`` tokens are dropped.
        max_prompt: Longest prompt, tokens.
        max_new_tokens: Longest answer, tokens.
        batch: Prompts answered together.
        seed: Seed of the draw and of the answers.
    """
    chosen = draw_documents(weights.cpu(), (number, 1), seed).squeeze(1).tolist()
    generator = torch.Generator().manual_seed(seed)
    prompts = [_prompt(corpus, document, generator) for document in chosen]
    kept = [(c, p) for c, p in zip(chosen, prompts, strict=True) if 0 < len(p) <= max_prompt]
    # Prompts of similar length together: less padding.
    kept.sort(key=lambda pair: len(pair[1]))
    documents: list[Document] = []
    for start in tqdm(range(0, len(kept), batch), desc="target's answers", unit="batch"):
        part = kept[start : start + batch]
        torch.manual_seed(seed + start)
        answers = _answer(model, [prompt for _, prompt in part], max_new_tokens)
        for (document, prompt), answer in zip(part, answers, strict=True):
            is_response = [False] * len(prompt) + [True] * len(answer)
            source = int(corpus.source_of[document])
            documents.append(Document(source, prompt + answer, is_response))
    return join_documents(documents, corpus.sources)


def _prompt(corpus: Corpus, document: int, generator: torch.Generator) -> list[int]:
    """Return a document's tokens up to the start of one of its responses."""
    start, length = int(corpus.starts[document]), int(corpus.lengths[document])
    is_response = corpus.is_response[start : start + length]
    begins = (is_response[1:] & ~is_response[:-1]).nonzero().squeeze(1) + 1
    if not len(begins):
        return []
    choice = int(torch.randint(len(begins), (), generator=generator))
    prompt: list[int] = corpus.token_ids[start : start + int(begins[choice])].tolist()
    return prompt


@torch.inference_mode()
def _answer(
    model: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[list[int]]:
    width = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    padded = [[pad] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    output = model.generate(  # type: ignore[operator]
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
    )
    ends = model.generation_config.eos_token_id
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    return [_up_to(answer, stops) for answer in output[:, width:].tolist()]


def _up_to(token_ids: list[int], stops: set[int]) -> list[int]:
    """Cut behind the first stop token."""
    for i, token in enumerate(token_ids):
        if token in stops:
            return token_ids[: i + 1]
    return token_ids
