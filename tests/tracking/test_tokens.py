"""Tokens of completions: how a run stores them, and how much of them."""

import random

from kl_comedy.tracking.tokens import STORED_TOKENS, TokenNumbers, token_pieces, traced_row
from token_rows import ByteTokenizer, as_bytes, stored


# --- the text of a token ----------------------------------------------------------------------------------------------
def test_pieces_of_bytes_make_up_the_text():
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.choice([*"aé\U0001f600".encode(), 0xFF]) for _ in range(draw.randint(0, 12))]
        pieces = token_pieces(as_bytes, ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == as_bytes(ids), ids


def test_a_character_of_four_tokens_is_in_the_last():
    assert token_pieces(as_bytes, list("a\U0001f600b".encode())) == ["a", "", "", "", "\U0001f600", "b"]


def test_a_decoder_that_changes_earlier_text_loses_nothing():
    def decode(ids):
        return "xyz" if len(ids) == 3 else "ab"[: len(ids)]

    assert token_pieces(decode, [1, 2, 3]) == ["", "", "xyz"]


# --- what a run stores ------------------------------------------------------------------------------------------------
def test_a_special_token_has_a_name_and_no_text():
    columns = stored("é")["per_token"]
    assert columns["text"] == ["", "é", ""]
    assert columns["special"] == {"2": "<end>"}


def test_a_long_completion_is_stored_in_part():
    assert len(stored("a" * 1000)["per_token"]["text"]) == STORED_TOKENS


def test_numbers_are_those_of_float32():
    # Neighbours in float32, which eight digits do not tell apart.
    values = [1.00000011920928955, 1.0000002384185791]
    numbers = TokenNumbers(k1_reverse=values, log_ratio=values, exact_reverse=values, use="tt")
    row = traced_row(numbers, [97, 98], 0, tokenizer=ByteTokenizer(), special_ids=frozenset())
    for name in ("k1_reverse", "log_ratio", "exact_reverse"):
        first, second = row["per_token"][name]
        assert first != second, name
        assert abs(first - values[0]) < 1e-8, name


def test_an_update_that_does_not_measure_the_exact_kl_stores_none():
    numbers = TokenNumbers(k1_reverse=[0.5], log_ratio=[0.5], exact_reverse=None, use="t")
    row = traced_row(numbers, [97], 0, tokenizer=ByteTokenizer(), special_ids=frozenset())
    assert row["per_token"]["exact_reverse"] is None
