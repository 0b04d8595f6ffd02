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

    @classmethod
    def judged(cls, name: str, good: bool, why: str) -> "Feature":
        """Return a feature that passes or fails."""
        return cls(name, Verdict.PASSES if good else Verdict.FAILS, why)


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
    information: float  # variance of the surprise in nats^2: what tests, rather than tokens
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
        return {"verdict": self.verdict, **msgspec.to_builtins(self, enc_hook=float)}

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        heading = f"{'statistic':30s}{'z':>8s}{'p-value':>10s}{'level':>10s}  difference"
        ranked = sorted(self.findings, key=lambda finding: finding.p_value)
        return [
            f"{self.url}, {self.kind}: {self.tokens:,} tokens in {self.answers:,} answers to "
            f"{self.requests:,} requests; {self.places:,} are used; the law is reported {self.law}",
            heading,
            *map(_line, ranked),
            *(f"{feature.name}: {feature.verdict} ({feature.why})" for feature in self.features),
            *(f"note: {note}" for note in self.notes),
            f"the server {self.verdict}",
        ]

    def junit(self) -> str:
        """Return the report for continuous integration, as JUnit writes its own."""
        found = [Feature.judged(f.name, not f.fails, in_words(f)) for f in self.findings]
        suite = ElementTree.Element("testsuite", name="eaglegbv audit served", hostname=self.url)
        tags = {Verdict.FAILS: "failure", Verdict.UNKNOWN: "skipped"}
        for feature in found + self.features:
            case = ElementTree.SubElement(suite, "testcase", name=feature.name, classname=self.kind)
            if feature.verdict in tags:
                ElementTree.SubElement(case, tags[feature.verdict], message=feature.why)
        for name, tag in (("failures", "failure"), ("skipped", "skipped"), ("tests", "testcase")):
            suite.set(name, str(len(suite.findall(f".//{tag}"))))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _line(finding: Finding) -> str:
    name = "FAILS " * bool(finding.fails) + finding.name
    numbers = f"{finding.z:8.2f}{finding.p_value:10.1e}{finding.level:10.1e}"
    return f"{name:30s}{numbers}  {in_words(finding)}"


def in_words(finding: Finding) -> str:
    """Return a finding's size in plain terms, and the least size that would have been found."""
    form = "{:.2%} {}" if finding.unit == "of tokens" else "{:.4f} {}"
    least = form.format(finding.smallest_shift, finding.unit)
    size = ""
    if finding.shift is not None:
        way = "more" if finding.shift > 0 else "less"
        size = f": {form.format(abs(finding.shift), finding.unit)} {way} than reported"
    return f"{finding.what}{size}; at least {least} would be found"
