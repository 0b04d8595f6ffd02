"""Conversations with a server, many at once, to count what is accepted, not to measure speed."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Key, Record, RunSettings, Setting
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.runner import Generate, converse
from eaglegbv.eval.statistics import ACCEPTANCE_LENGTH, BLOCK_EFFICIENCY, Estimate
from eaglegbv.rng import request_seed

HEADINGS = (
    *("setting", "conversations", "broken off", "tokens"),
    *("acceptance length", "block efficiency"),
)


def hold_at_once(
    generate: Generate,
    questions: Sequence[Question],
    settings: RunSettings,
    *,
    own: Sequence[Setting],
    at_once: int,
    done: Collection[Key],
    on_record: Callable[[Record], None],
) -> None:
    """Ask every question in some of the settings, several conversations at a time.

    Args:
        generate: Answers conversations; called from several threads.
        questions: The questions to ask.
        settings: Settings of the whole run; a question's seed is the same in every setting.
        own: The settings in which ``generate`` answers.
        at_once: Number of conversations at a time.
        done: Keys of records that need not be held again.
        on_record: Receives each record, in the calling thread, as soon as it is complete.
    """
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [
            pool.submit(converse, generate, question, setting, settings, repeat, seed)
            for repeat in range(settings.repeats)
            for setting in own
            for number, question in enumerate(questions)
            for seed in [request_seed(settings.seed, repeat * len(questions) + number)]
            if (setting.name, question.id, repeat) not in done
        ]
        try:
            for future in as_completed(waiting):
                on_record(future.result())
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Accepted:
    """What was accepted in one setting.

    Attributes:
        setting: Name of the setting.
        conversations: Number of conversations held to their end.
        broken: Number of conversations that broke off; they count in no figure.
        tokens: Number of tokens of the answers.
        acceptance_length: Accepted tokens per target forward.
        block_efficiency: Committed tokens per target forward.
    """

    setting: str
    conversations: int
    broken: int
    tokens: int
    acceptance_length: Estimate
    block_efficiency: Estimate

    @property
    def row(self) -> list[str]:
        """Cells of the table row, in the order of :data:`HEADINGS`."""
        counts = (self.conversations, self.broken, self.tokens)
        figures = (self.acceptance_length, self.block_efficiency)
        return [self.setting, *map(str, counts), *map(with_interval, figures)]


def accepted(settings: RunSettings, records: Sequence[Record]) -> list[Accepted]:
    """Return the figures of every setting with a record, in the run's order."""
    found = []
    for setting in settings.settings:
        own = [record for record in records if record.setting == setting.name]
        whole = [record for record in own if record.error is None]
        if own:
            found.append(
                Accepted(
                    setting=setting.name,
                    conversations=len(whole),
                    broken=len(own) - len(whole),
                    tokens=sum(turn.completion_tokens for r in whole for turn in r.turns),
                    acceptance_length=ACCEPTANCE_LENGTH.pooled(whole),
                    block_efficiency=BLOCK_EFFICIENCY.pooled(whole),
                )
            )
    return found
