"""A group of requests whose trees were judged in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eaglegbv.outcomes import Judgement, Outcome
from eaglegbv.recording import tree_records
from eaglegbv.scheduler.batch import Group, Layout
from eaglegbv.tree_record import TreeRecord


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """A group whose trees were judged, with the results.

    Attributes:
        group: The trees, on the device on which they were judged.
        layout: Layout of the group in the forward.
        judgement: The verdict on the trees.
        outcomes: The verdict for each request, on the host.
    """

    group: Group
    layout: Layout
    judgement: Judgement
    outcomes: list[Outcome]

    def tree_records(self, kept: Mapping[int, Sequence[int]]) -> list[TreeRecord]:
        """Return the records of the trees, once they are committed; none without evidence.

        Args:
            kept: The tokens that each request was given, by its number.
        """
        evidence = self.judgement.evidence
        if evidence is None:
            return []
        return tree_records(self.group, self.judgement.verdict, evidence, kept)
