"""Statistics of the speed benchmark: medians, ratios, the check for equal work, and the page."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from speed import setup
from speed.phase_timer import PHASES
from speed.report import format_number, main_table, page, ratio_table
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


OURS, TRL = "ours-grpo-default", "trl-grpo-default"
RUNS = [repetition(OURS, n, w) for n, w in enumerate((10.0, 12.0, 11.0))]
RUNS += [repetition(TRL, n, w, peak=9 * 2**30) for n, w in enumerate((40.0, 30.0, 33.0))]


def test_the_warm_up_does_not_count_and_medians_do():
    assert figures(RUNS[0])["wall"] == 10.0 and figures(RUNS[0])["peak_above_loaded"] == 2.0
    wall = summarize(RUNS)[OURS]["wall"]
    assert (wall.median, wall.low, wall.high, wall.count) == (11.0, 10.0, 12.0, 3)
    with pytest.raises(ValueError, match="no repetition"):
        spread([])


def test_ratios_are_of_medians_with_the_range_of_pairs():
    ratio = ratios(RUNS, TRL, OURS, "wall")
    assert ratio.median == 3.0 and (ratio.low, ratio.high) == (2.5, 4.0)
    assert fastest(summarize(RUNS), "trl-") == TRL and fastest(summarize(RUNS), "none-") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tokens": 120}, "trained tokens"), ({"prompts": "other"}, "prompts differ")],
    ids=["tokens", "prompts"],
)
def test_unequal_work_is_reported(change, message):
    assert unequal_work(RUNS) == []
    odd = repetition(OURS, 0, 10.0, **change)
    assert any(message in line for line in unequal_work([odd, *RUNS[1:]]))


def test_the_page_has_every_variant_and_the_command():
    results = {
        "command": "python bench/speed/run.py --x",
        "machine": {
            "cpu": "c",
            "cores": 2,
            "memory_gib": 24.0,
            "threads": 2,
            "python": "3",
            "commit": "abc",
            "versions": {"torch": "2"},
        },
        "variants": {OURS: "note"},
        "tasks": {"gsm8k": {"summary": "s", "repetitions": RUNS, "failures": {"trl-x": "boom"}}},
    }
    text = page(results)
    assert OURS in text and "python bench/speed/run.py --x" in text and "boom" in text and "Work was equal" in text
    assert "0.333" in ratio_table(RUNS) and TRL in main_table(RUNS) and format_number(0.0) == "0.000"


def test_every_peer_has_its_line_in_the_ratios():
    runs = [
        *RUNS,
        *(repetition(f"torchrl-grpo-{kind}", 0, wall) for kind, wall in (("default", 50.0), ("packed", 20.0))),
    ]
    lines = ratio_table(runs).splitlines()[2:]
    assert [line.split("|")[1].strip().removeprefix(f"{OURS} / ") for line in lines] == [
        f"{TRL} (fastest measured)",
        "torchrl-grpo-default",
        "torchrl-grpo-packed (fastest measured)",
    ]
    assert "0.200" in lines[1] and "0.500" in lines[2]


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_is_pinned_and_reported_absent_where_it_is_not(peer, tmp_path, monkeypatch):
    assert all(str(pin.specifier).startswith("==") for pin in pins(peer)) and pins(peer)[0].name == peer
    assert {variant.system for variant in VARIANTS.values()} == {"ours", *PEERS}
    monkeypatch.setattr(setup, "HERE", tmp_path)
    (tmp_path / f"requirements-{peer}.txt").write_text("nowhere==1.0\n")
    assert [pin.name for pin in setup.absent(peer)] == ["nowhere"]
    with pytest.raises(SystemExit, match=f"setup.py {peer}"):
        setup.add_to_path(peer)


def test_a_requirement_may_be_met_by_the_environment_or_the_folder(tmp_path):
    distribution = tmp_path / "only_here-2.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: only_here\nVersion: 2.0\n")
    wants = ["torch>=2", "only_here>=2", "only_here<2", "torch<1", 'absent; extra == "x"']
    assert [line.split(" ")[0] for line in setup.unmet(wants, tmp_path)] == ["only_here<2", "torch<1"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.system == "ours"])
def test_every_setting_of_ours_is_a_config(task, name, tmp_path):
    from kl_comedy.config import load_config

    config = load_config(None, overrides(task, VARIANTS[name], model=tmp_path, updates=2, seed=0, output=tmp_path))
    assert config.rollout.max_new_tokens == TASKS[task].max_new_tokens and config.rollout.group_size == 8
