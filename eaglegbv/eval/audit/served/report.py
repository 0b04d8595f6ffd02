"""The report of an audit: verdicts in words, JSON and JUnit's XML."""

from enum import StrEnum
from typing import Any
from xml.etree import ElementTree

import msgspec

from eaglegbv.eval.audit.served.laws import Settings
from eaglegbv.eval.audit.served.statistics import Finding

EQUAL = "equal seeds"


class Verdict(StrEnum):
    """What an audit says of a server, or of one of its features."""

    PASSES = "passes"
    FAILS = "fails"
    UNKNOWN = "cannot tell"


class Feature(msgspec.Struct, frozen=True):
    """What an audit says of one feature, and why."""

    name: str
    verdict: Verdict
    why: str


def judged(name: str, *, good: bool, why: str) -> Feature:
    """Return a feature that passes or fails."""
    return Feature(name, Verdict.PASSES if good else Verdict.FAILS, why)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit did, and what it found."""

    url: str
    kind: str
    model: str | None
    settings: Settings
    law: str  # which law the server reports, in words
    version: str  # of this package
    requests: int
    answers: int
    tokens: int
    places: int  # tokens that the statistics use
    level: float  # at which all findings together would fail an honest server
    information: dict[str, float]  # sums of variances, by statistic: what tests, rather than tokens
    findings: list[Finding]
    features: list[Feature]
    notes: list[str]

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        # That equal seeds give equal answers is a convenience, which no server promises in batches.
        told = {f.verdict for f in self.features if f.name != EQUAL}
        return Verdict.FAILS if Verdict.FAILS in told else self.features[0].verdict

    def told(self) -> dict[str, Any]:
        """Return the report as it is written, with its verdict."""
        return {"verdict": self.verdict, **msgspec.to_builtins(self)}

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        heading = f"{'statistic':30s}{'z':>8s}{'p-value':>10s}{'level':>10s}  difference"
        found = [
            f"{'FAILS ' if f.fails else ''}{f.name:{24 if f.fails else 30}s}{f.z:8.2f}"
            f"{f.p_value:10.1e}{f.level:10.1e}  {in_words(f)}"
            for f in sorted(self.findings, key=lambda finding: finding.p_value)
        ]
        return [
            f"{self.url}, {self.kind}: {self.tokens:,} tokens in {self.answers:,} answers to "
            f"{self.requests:,} requests; {self.places:,} are used; the law is reported {self.law}",
            *([heading, *found] if found else []),
            *(f"{feature.name}: {feature.verdict} ({feature.why})" for feature in self.features),
            *(f"note: {note}" for note in self.notes),
            f"the server {self.verdict}",
        ]

    def junit(self) -> str:
        """Return the report for continuous integration, as JUnit writes its own."""
        features = [judged(f.name, good=not f.fails, why=in_words(f)) for f in self.findings]
        features += self.features
        tags = {Verdict.FAILS: "failure", Verdict.UNKNOWN: "skipped"}
        suite = ElementTree.Element("testsuite", name="eaglegbv audit served", hostname=self.url)
        for feature in features:
            names = {"classname": self.kind, "name": feature.name}
            case = ElementTree.SubElement(suite, "testcase", names)
            if feature.verdict in tags:
                ElementTree.SubElement(case, tags[feature.verdict], message=feature.why)
        counted = {"failures": "failure", "skipped": "skipped", "tests": "testcase"}
        for name, tag in counted.items():
            suite.set(name, str(len(list(suite.iter(tag)))))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def in_words(finding: Finding) -> str:
    """Return a finding's size in plain terms, and the least size that would have been found."""
    rate = finding.unit == "of tokens"

    def size(value: float) -> str:
        return f"{100 * value:.2f}%" if rate else f"{value:.4f}"

    least = f"at least {size(finding.smallest_shift)} {finding.unit} would be found"
    if finding.shift is None:
        return f"{finding.what}; {least}"
    way = "more" if finding.shift > 0 else "less"
    return f"{finding.what}: {size(abs(finding.shift))} {finding.unit} {way} than reported; {least}"
