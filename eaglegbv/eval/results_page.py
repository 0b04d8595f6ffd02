"""The page of results, as Markdown, from measured files; every number and verdict is computed."""

from collections.abc import Iterator, Mapping, Sequence

from eaglegbv.eval.evidence import (
    AGAIN,
    BatchResults,
    DrafterResults,
    Evidence,
    PaperResults,
    kind_among,
)
from eaglegbv.eval.papers.registry import PAPERS
from eaglegbv.eval.records import Results
from eaglegbv.eval.results_again import again_section
from eaglegbv.eval.results_sections import (
    Section,
    batch_section,
    drafters_section,
    listed,
    paper_section,
    run_section,
    study_section,
)
from eaglegbv.eval.results_when import when_section
from eaglegbv.eval.study import Study

EXPECTED: Mapping[str, str] = {
    "mt-bench": "the full MT-Bench run",
    "mt-bench-again": "the same a second time",
    "baselines": "transformers' plain and assisted generation beside the engine",
    **{f"paper-{name}": paper.title for name, paper in sorted(PAPERS.items())},
    "study": "sampled against deterministic trees, and the draft temperature",
    "batch": "tokens/s by batch",
    "drafters": "drafters side by side",
}
"""The sections that the page should have; it names those that are missing."""


def page(
    evidence: Mapping[str, Evidence],
    pictures: Mapping[str, Sequence[str]],
    others: Sequence[str] = (),
) -> str:
    """Return the page.

    Args:
        evidence: Measured files by name.
        pictures: Links to the pictures of each file, by the same names.
        others: Names of files in the same folder that are not shown.
    """
    order = _ordered(evidence)
    sections = [
        when_section(evidence, order),
        *(section(name, evidence[name], evidence, pictures.get(name, ())) for name in order),
    ]
    return (
        "\n\n".join(
            [
                "# Results",
                _INTRODUCTION,
                *_missing(evidence, others),
                "\n".join(f"- [{one.title}](#{one.anchor})" for one in sections),
                *(one.text for one in sections),
            ]
        )
        + "\n"
    )


_INTRODUCTION = (
    "Written by `eaglegbv bench results` from the measured files in [results/](results): no number "
    "or verdict here is typed by hand. How figures are defined, and what counts in them: "
    "[benchmarks.md](benchmarks.md). Brackets are 95% bootstrap intervals over questions unless "
    "something else is said. Speeds are of the machine that is named, and of that day's code and "
    "heads; other machines and models give others. Of runs by batch the latest stand first."
)


def section(
    name: str, content: Evidence, evidence: Mapping[str, Evidence], pictures: Sequence[str]
) -> Section:
    """Return the section of one file."""
    drawn = "\n\n".join(f"![{link.rpartition('/')[2]}]({link})" for link in pictures)
    if isinstance(content, PaperResults):
        return paper_section(content, drawn, title=EXPECTED.get(name, name))
    if isinstance(content, BatchResults):
        return batch_section(name, content, drawn)
    if isinstance(content, DrafterResults):
        return drafters_section(content, drawn)
    if isinstance(content, Study):
        return study_section(content, drawn)
    first = evidence.get(name.removesuffix(AGAIN))
    if name.endswith(AGAIN) and isinstance(first, Results):
        return again_section(first, content)
    return run_section(name, content, drawn)


def _ordered(evidence: Mapping[str, Evidence]) -> list[str]:
    """Return the files' names in the order of their kinds, with the latest runs by batch first."""
    latest = sorted(sorted(evidence), key=lambda name: _started(evidence[name]), reverse=True)
    return sorted(latest, key=_kind)


def _kind(name: str) -> int:
    """Return the position of a file's kind on the page."""
    order = list(EXPECTED)
    kind = kind_among(order, name)
    return len(order) if kind is None else order.index(kind)


def _started(content: Evidence) -> str:
    """Return when a run by batch began; other kinds have no such order."""
    if not isinstance(content, BatchResults) or content.environment is None:
        return ""
    return content.environment.started


def _missing(evidence: Mapping[str, Evidence], others: Sequence[str]) -> Iterator[str]:
    absent = [f"{what} (`{name}.json`)" for name, what in EXPECTED.items() if name not in evidence]
    if absent:
        yield f"Not measured, so missing here: {'; '.join(absent)}."
    if others:
        yield f"Measured for other pages, and not shown here: {listed(others)}."
