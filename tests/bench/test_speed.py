"""Statistics of the speed benchmark: medians, ratios, the check for equal work, and the page."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from speed import setup
from speed.phase_timer import PHASES
from speed.report import format_number, main_table, page, range_over_trl, ratio_table
from speed.setup import PEERS, pins
from speed.summary import fastest, figures, ratios, spread, summarize, unequal_work
from speed.variants import VARIANTS
from speed.workload import TASKS, overrides


def repetition(variant, number, wall, *, tokens=100, prompts="p", peak=3 * 2**30):
    update = {
        "wall_s": wall,
        "cpu_s": 2 * wall,
        "generated_tokens": tokens,
        "trained_tokens": tokens,
        "prompt_tokens": 10,
        "phases": {name: wall / len(PHASES) for name in PHASES},
    }
    warm = {**update, "wall_s": 1000.0}
    return {
        "variant": variant,
        "repetition": number,
        "updates": [warm, update],
        "rss_loaded": 2**30,
        "rss_peak": peak,
        "prompts": prompts,
        "threads": 2,
        "load_average": 0.5,
        "model": "m",
    }


OURS = "ours-grpo-default"
TRL = "trl-grpo-default"
RUNS = [
    repetition(OURS, 0, 10.0),
    repetition(OURS, 1, 12.0),
    repetition(OURS, 2, 11.0),
    repetition(TRL, 0, 40.0, peak=9 * 2**30),
    repetition(TRL, 1, 30.0, peak=9 * 2**30),
    repetition(TRL, 2, 33.0, peak=9 * 2**30),
]


def test_the_warm_up_does_not_count():
    measured = figures(RUNS[0])
    assert measured["wall"] == 10.0
    assert measured["peak_above_loaded"] == 2.0, "in GiB"


def test_a_summary_is_the_median_and_the_range():
    wall = summarize(RUNS)[OURS]["wall"]
    assert (wall.median, wall.low, wall.high, wall.count) == (11.0, 10.0, 12.0, 3)


def test_nothing_has_no_summary():
    with pytest.raises(ValueError, match="no repetition"):
        spread([])


def test_ratios_are_of_medians_with_the_range_of_pairs():
    ratio = ratios(RUNS, TRL, OURS, "wall")
    assert ratio.median == 3.0
    assert (ratio.low, ratio.high) == (2.5, 4.0)


def test_the_fastest_variant_of_a_system():
    summary = summarize(RUNS)
    assert fastest(summary, "trl-") == TRL
    assert fastest(summary, "none-") is None


def test_equal_work_is_not_reported():
    assert unequal_work(RUNS) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tokens": 120}, "trained tokens"), ({"prompts": "other"}, "prompts differ")],
    ids=["tokens", "prompts"],
)
def test_unequal_work_is_reported(change, message):
    odd = repetition(OURS, 0, 10.0, **change)
    assert any(message in line for line in unequal_work([odd, *RUNS[1:]]))


@pytest.fixture(scope="module")
def page_text():
    machine = {
        "cpu": "c",
        "cores": 2,
        "memory_gib": 24.0,
        "threads": 2,
        "python": "3",
        "commit": "abc",
        "versions": {"torch": "2"},
    }
    return page(
        {
            "command": "python bench/speed/run.py --x",
            "machine": machine,
            "variants": {OURS: "note"},
            "tasks": {"gsm8k": {"summary": "s", "repetitions": RUNS, "failures": {"trl-x": "boom"}}},
        }
    )


@pytest.mark.parametrize("text", [OURS, "python bench/speed/run.py --x", "boom", "Work was equal"])
def test_the_page_has_every_variant_the_command_and_failures(page_text, text):
    assert text in page_text


def test_the_tables_have_the_ratio_and_the_variants():
    assert "0.333" in ratio_table(RUNS)
    assert TRL in main_table(RUNS)


def test_the_page_leads_with_the_range_over_trl(page_text):
    # 30/12 and 40/10 seconds for the same tokens.
    assert "**kl_comedy trains 2.5 to 4.0 times as many tokens per second as TRL**" in page_text
    assert page_text.index("**kl_comedy trains") < page_text.index("| variant |")


def test_the_range_is_over_all_tasks_settings_and_repetitions():
    faster = repetition("trl-grpo-whole", 0, 20.0)
    slower = [repetition(OURS, 0, 10.0), repetition(TRL, 0, 50.0)]
    tasks = {"gsm8k": {"repetitions": [*RUNS, faster]}, "chain_sum": {"repetitions": slower}}
    assert "2.0 to 5.0 times" in range_over_trl(tasks)
    assert range_over_trl({"gsm8k": {"repetitions": RUNS[:3]}}) is None


def test_a_number_has_its_digits_also_where_it_is_zero():
    assert format_number(0.0) == "0.000"


def test_every_peer_has_its_line_in_the_ratios():
    runs = [*RUNS, repetition("torchrl-grpo-default", 0, 50.0), repetition("torchrl-grpo-packed", 0, 20.0)]
    lines = ratio_table(runs).splitlines()[2:]
    assert [line.split("|")[1].strip().removeprefix(f"{OURS} / ") for line in lines] == [
        f"{TRL} (fastest measured)",
        "torchrl-grpo-default",
        "torchrl-grpo-packed (fastest measured)",
    ]
    assert "0.200" in lines[1]
    assert "0.500" in lines[2]


# --- peers --------------------------------------------------------------------------------------------------------
def test_every_peer_has_a_variant():
    assert {variant.system for variant in VARIANTS.values()} == {"ours", *PEERS}


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_is_pinned(peer):
    assert pins(peer)[0].name == peer
    for pin in pins(peer):
        assert str(pin.specifier).startswith("==")


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_absent_is_named_with_the_command(peer, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "HERE", tmp_path)
    (tmp_path / f"requirements-{peer}.txt").write_text("nowhere==1.0\n")
    assert [pin.name for pin in setup.absent(peer)] == ["nowhere"]
    with pytest.raises(SystemExit, match=f"setup.py {peer}"):
        setup.add_to_path(peer)


def test_a_requirement_may_be_met_by_the_environment_or_the_folder(tmp_path):
    distribution = tmp_path / "only_here-2.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: only_here\nVersion: 2.0\n")
    requirements = ["torch>=2", "only_here>=2", "only_here<2", "torch<1", 'absent; extra == "x"']
    assert [line.split(" ")[0] for line in setup.unmet(requirements, tmp_path)] == ["only_here<2", "torch<1"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.system == "ours"])
def test_every_setting_of_ours_is_a_config(task, name, tmp_path):
    from kl_comedy.config import load_config

    config = load_config(None, overrides(task, VARIANTS[name], model=tmp_path, updates=2, seed=0, output=tmp_path))
    assert config.rollout.max_new_tokens == TASKS[task].max_new_tokens
    assert config.rollout.group_size == 8
