"""Prompts have the lengths asked for, and are spread over the questions."""

from eaglegbv.eval.questions import PromptSource

QUESTIONS = PromptSource([[1, 2, 3], [4, 5], [6, 7, 8, 9]])


def test_prompts_are_questions_or_so_many_tokens_of_several() -> None:
    assert QUESTIONS.take(4, 0) == [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2, 3]]
    assert QUESTIONS.take(2, 4) == [[5, 1, 2, 3], [8, 9, 4, 5]]
    assert [len(prompt) for prompt in QUESTIONS.take(3, 50)] == [50] * 3


def test_few_prompts_are_spread_over_the_questions() -> None:
    many = PromptSource([[n] for n in range(80)])
    assert many.take(8, 0) == [[n] for n in range(0, 80, 10)]
    assert many.take(3, 0) == [[0], [26], [53]]
    assert many.take(1, 0) == [[0]]
