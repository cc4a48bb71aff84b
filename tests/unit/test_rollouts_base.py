"""Which sampling is allowed where, and what ends a completion."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.config.schema import RolloutConfig
from kl_comedy.errors import UserError
from kl_comedy.records import STOP_REASONS
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts import Sampling, check_training_sampling, sampling_from
from kl_comedy.rollouts.decoding import StopStrings, ending
from kl_comedy.rollouts.hf import LogpRecorder, StopOnText


def test_plain_temperature_sampling_is_what_training_needs():
    check_training_sampling(RolloutConfig(temperature=0.7, stop=["\n"]))
    assert Sampling(temperature=0.7, max_new_tokens=4).training_mismatches() == []


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.05)])
def test_truncation_is_refused_in_training_with_its_reason(key, value):
    with pytest.raises(UserError, match=rf"rollout\.{key}: got {value}; training needs .*differentiates the full one"):
        check_training_sampling(RolloutConfig(**{key: value}))
    assert sampling_from(RolloutConfig(**{key: value})).training_mismatches()


def test_every_mismatch_is_told_at_once():
    with pytest.raises(UserError) as error:
        check_training_sampling(RolloutConfig(top_p=0.9, top_k=5, min_p=0.1))
    assert [line.split(":")[0] for line in str(error.value).split("\n")] == [
        "rollout.top_p",
        "rollout.top_k",
        "rollout.min_p",
    ]
    assert Sampling(temperature=0, max_new_tokens=1).training_mismatches()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("max_new_tokens", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 1.0),
        ("stop", [""]),
    ],
)
def test_values_out_of_range_name_their_key(key, value):
    with pytest.raises(UserError, match=rf"rollout\.{key}: got"):
        sampling_from(RolloutConfig(**{key: value}))


def test_a_stop_string_is_not_a_list_of_letters():
    with pytest.raises(UserError, match="stop"):
        Sampling(temperature=1, max_new_tokens=1, stop="ab")


def test_the_hf_backend_is_registered_and_names_an_unknown_option():
    assert "hf" in ROLLOUTS
    with pytest.raises(UserError, match=r"rollout\.options\.dtype: no such key"):
        ROLLOUTS.get("hf").fn(RolloutConfig(options={"dtype": "half"}), loaded=None)


@given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=8), ends=st.sets(st.integers(0, 4)), stop=st.integers(0, 8))
def test_an_ending_is_the_first_of_end_token_stop_string_and_limit(ids, ends, stop):
    stop = min(stop, len(ids))
    length, reason = ending(ids, sorted(ends), stop)
    assert 1 <= length <= len(ids) and reason in STOP_REASONS
    assert not any(token in ends for token in ids[: length - 1])
    assert (ids[length - 1] in ends) is (reason == "eos") or reason == "stop"
    assert reason != "length" or (length == len(ids) and not stop)
    assert reason != "stop" or length == stop


def test_the_recorder_keeps_the_log_prob_of_what_was_drawn():
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3, 7, generator=g)
    drawn_BT = torch.randint(0, 7, (3, 4), generator=g)
    recorder, ids = LogpRecorder(), torch.zeros(3, 2, dtype=torch.long)
    for step in range(4):
        given = scores[step].clone()
        assert recorder(ids, given) is given
        ids = torch.cat([ids, drawn_BT[:, step : step + 1]], dim=1)
    expected = scores.transpose(0, 1).log_softmax(-1).gather(2, drawn_BT[..., None])[..., 0]
    torch.testing.assert_close(recorder.finish(drawn_BT), expected)


class Letters:
    """A tokenizer whose token n is the n-th piece; one piece holds several letters."""

    pieces = ("a", "b", "ab", "xaby", "é", "<e>")

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return "".join(self.pieces[n] for n in ids)


@given(
    ids=st.lists(st.integers(0, 5), max_size=12),
    stop=st.lists(st.sampled_from(["ab", "ba", "b<e>", "aa", "xaby", "éé"]), min_size=1, max_size=2),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_a_stop_string_ends_at_the_token_that_completes_it_and_never_in_the_prompt(ids, stop, prompt):
    criterion = StopOnText(StopStrings(Letters(), stop), prompt_length=len(prompt), rows=1)
    ended = 0
    for n in range(1, len(ids) + 1):
        if bool(criterion(torch.tensor([prompt + ids[:n]]), None)[0]) and not ended:
            ended = n
    texts = ["".join(Letters.pieces[i] for i in ids[:n]) for n in range(len(ids) + 1)]
    expected = next((n for n, text in enumerate(texts) if any(s in text for s in stop)), 0)
    assert criterion.length_B == [expected] == [ended]
