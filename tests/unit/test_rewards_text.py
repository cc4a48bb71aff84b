"""The string rewards: extraction rules, formats, options, and that hostile text stays cheap in process."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.rewards import score
from kl_comedy.rewards.text import chosen_letter, clean, final_segment, nesting_depth, number, tail


def verdict(name: str, completion: str, answer: str, **options: object) -> tuple[float, str]:
    (reward,) = score(name, completions=[completion], answers=[answer], **options)
    return reward.value, reward.status


def test_exact_answer_reads_the_final_number_or_text() -> None:
    right = [
        ("7", "7"),
        (" 7 apples", "7"),
        ("2 + 5 = 7\n", "7"),
        ("A: 8\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50", "1234.5"),
        ("A: -3", "-3"),
        ("x = 6/8", "3/4"),
        ("x = 0.75", "3/4"),
        ("The sum 2 + 3 is 5.", "5"),
        ("USA: 50 of 7", "7"),
        ("A:\n7", "7"),
        ("A: (Paris)", "paris"),
        ("7.0", "7"),
    ]
    wrong = [("2 + 5 = 7\nA: 8", "7"), ("A: -3", "3"), ("7\n20+1=21", "7"), ("77", "7"), ("A: London", "paris")]
    unparseable = ["3+4", "A: 3 + 4", "", "A:", "seven", "1/0"]
    for completion, answer in right:
        assert verdict("exact_answer", completion, answer) == (1.0, "ok"), completion
    for completion, answer in wrong:
        assert verdict("exact_answer", completion, answer) == (0.0, "ok"), completion
    for completion in unparseable:
        assert {verdict("exact_answer", completion, gold) for gold in ("7", "3", "4")} == {(0.0, "unparseable")}
    assert verdict("exact_answer", "So => 9 (= 3 * 3)", "9", markers=["=>"]) == (1.0, "ok")
    assert verdict("exact_answer", "anything", "?!") == (0.0, "refused"), "a gold with nothing to compare"


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_read_back_with_and_without_commas(value: int) -> None:
    assert number(str(value)) == number(f"{value:,}") == number(f" {value}. ".strip(" .")) == Fraction(value)
    assert final_segment(f"9 = 9\n#### {value}") == (str(value), True)
    assert verdict("exact_answer", f"first 1\nA: {value:,}.", str(value)) == (1.0, "ok")
    assert verdict("exact_answer", f"A: {value + 1}", str(value)) == (0.0, "ok")


def test_the_chosen_letter() -> None:
    for text, letter in (
        ("B", "B"),
        ("B.", "B"),
        ("(c) is not capital", None),
        ("The answer is (C).", "C"),
        ("the answer is: **D**", "D"),
        ("Answer: A", "A"),
        ("The correct answer is option B because A is wrong", "B"),
        ("Not (A) but (D).", "D"),
        ("\\boxed{B} though the answer is C", "B"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("\\boxed{\\mathrm{X}}", None),
        ("A train leaves at noon.", None),
        ("I think about A bird", None),
        ("B) 12", "B"),
        ("The answer is obvious", None),
        ("answer is a matter of taste", None),
        ("It must be C, not A. So C", "C"),
        ("", None),
        ("DNA", None),
    ):
        assert chosen_letter(text, "ABCD") == letter, text


def test_letters_follow_the_choices_of_the_problem() -> None:
    metas = [{"choices": ["x", "y"]}]
    (reward,) = score("multiple_choice", completions=["(B) or (D)"], answers=["B"], metas=metas)
    assert reward.value == 1.0
    with pytest.raises(UserError, match="letter of the right choice"):
        score("multiple_choice", completions=["B"], answers=["D"], metas=metas)
    with pytest.raises(UserError, match="distinct capital letters"):
        score("multiple_choice", completions=["B"], answers=["B"], letters="ab")


def test_format_styles() -> None:
    for style, good, bad in (
        ("boxed", "is \\boxed{4}", "is \\boxed{} or 4"),
        ("gsm8k", "so\n#### 4\n", "#### 4\nand more"),
        ("answer_line", "so\nA: 4", "DATA: 4"),
        ("answer_tag", "so <answer>4</answer>", "<answer>4</answer> <answer>5</answer>"),
        (
            "think_answer",
            "<think>a\nb</think>\n<answer>4</answer>\n",
            "<think>a</think><think></think><answer>4</answer>",
        ),
        ("number", " -1,234.5\n", "4 apples"),
    ):
        rewards = score("format", completions=[good, bad, ""], answers=[""] * 3, style=style)
        assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0], style
    assert verdict("format", "a" * 11, "", max_chars=10) == (0.0, "refused")
    for options, message in (
        ({"pattern": "(a"}, r"pattern: got '\(a'"),
        ({"pattern": "a", "style": "boxed"}, "exclude each other"),
        ({"style": "think_answr"}, "think_answer"),
    ):
        with pytest.raises(UserError, match=message):
            score("format", completions=[], answers=[], **options)


def test_length_is_a_clipped_ramp() -> None:
    values = [verdict("length", "x" * n, "", free=10, full=20)[0] for n in (0, 10, 15, 20, 99)]
    assert values == [0.0, 0.0, 0.5, 1.0, 1.0]


ATTACKS = [
    " " * 16_000,
    "answer" + " " * 16_000,
    "answer is " * 1_600,
    "(" * 16_000,
    "(\n" * 8_000,
    "1" * 16_000,
    "1 " * 8_000,
    "1+" * 8_000,
    "1-(" * 5_000,
    "1 " + "-" * 16_000,
    "1" + ")" * 16_000,
    ")-" * 8_000,
    "\\boxed{" * 2_000,
    "1,111" * 3_000,
    "*_`\"'([" * 2_000,
    "= " * 8_000,
    "A:" * 8_000,
    "A" * 16_000,
    "A " * 8_000,
    "1.1" * 5_000,
    "\n" * 16_000,
    "x" * 5_000_000,
]


@pytest.mark.parametrize(("name", "answer"), [("exact_answer", "7"), ("exact_answer", "x"), ("multiple_choice", "A")])
def test_in_process_rewards_are_cheap_on_attacks(name: str, answer: str) -> None:
    for attack in ATTACKS:
        started = time.process_time()
        score(name, completions=[attack], answers=[answer])
        assert time.process_time() - started < 0.5, attack[:10]


@given(st.text(alphabet="ab\n", max_size=300), st.integers(1, 100))
def test_tail_is_a_suffix_within_the_cap(text: str, cap: int) -> None:
    end = tail(text, cap)
    assert text.endswith(end) and len(end) <= cap
    assert end == text if len(text) <= cap else len(end) > 0


@given(st.text())
def test_clean_text_can_be_encoded_and_has_no_controls(text: str) -> None:
    cleaned = clean(text + "\ud800\x00\x1b")
    cleaned.encode("utf-8")
    assert not any(ord(char) < 32 and char not in "\n\t" for char in cleaned)


@given(st.integers(0, 40), st.sampled_from(["{}", "()", "[]"]))
def test_depth_counts_nesting_from_either_side(levels: int, pair: str) -> None:
    nested = pair[0] * levels + "x" + pair[1] * levels
    assert nesting_depth(nested) == nesting_depth(nested[levels:]) == levels
    assert nesting_depth((pair + " ") * 50) == 1
