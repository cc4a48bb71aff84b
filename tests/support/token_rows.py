"""Rows of a table of samples with the numbers of their tokens, as training stores them."""

from kl_comedy.tracking.tokens import STORED_TOKENS, TokenNumbers, traced_row


def as_bytes(ids):
    return bytes(ids).decode("utf-8", "replace")


class ByteTokenizer:
    """One token for a byte, and 256 as the end."""

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return as_bytes([token for token in ids if token < 256])

    def convert_ids_to_tokens(self, token):
        return "<end>"


def stored(text, *, group=0, value=0.25, **facts):
    """A row of a table of samples with the tokens of ``text`` and its end."""
    ids = [*text.encode(), 256]
    count = min(len(ids), STORED_TOKENS)
    values = [value] * count
    numbers = TokenNumbers(k1_reverse=values, log_ratio=values, exact_reverse=values, use="t" * count)
    row = traced_row(numbers, ids, group, tokenizer=ByteTokenizer(), special_ids=frozenset([256]))
    base = {"problem": "1+1=", "answer": "2", "reward": 1.0, "status": "ok", "stop_reason": "eos", "tokens": len(ids)}
    return base | row | facts
