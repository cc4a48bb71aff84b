"""Every config on the page "From a laptop to a cluster" is checked, as the page says."""

import re
import shlex
from pathlib import Path

import pytest

from kl_comedy.cli.check import what_starts
from kl_comedy.config import load_config
from kl_comedy.config.shipped import find_config
from kl_comedy.training.build import check_parts, check_training

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_laptop_to_cluster.md").read_text()
CHECKS = re.findall(r"^    kl-comedy check (.*)$", PAGE, re.MULTILINE)


def test_the_page_has_checks():
    assert len(CHECKS) == 5


@pytest.mark.parametrize("line", CHECKS)
def test_a_check_on_the_page_passes(line, monkeypatch):
    file, *words = shlex.split(line, comments=True)
    gpus = 0
    if "--gpus" in words:
        gpus = int(words[words.index("--gpus") + 1])
    monkeypatch.chdir(ROOT)
    config = load_config(find_config(file), [word for word in words if "=" in word])
    check_training(config)
    check_parts(config)
    processes = config.train.devices * config.train.nodes
    expected = "1 process" if processes == 1 else f"{processes} processes, strategy {config.train.strategy}"
    assert what_starts(config, gpus=gpus)["processes"] == expected


def test_the_page_checks_what_it_trains():
    checked = {line.split()[0] for line in CHECKS}
    trained = set(re.findall(r"^    kl-comedy train (\S+)", PAGE, re.MULTILINE))
    assert trained <= checked


def test_the_pages_own_config_loads(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "my_run.yaml"
    file.write_text(text)
    config = load_config(file)
    assert config.model.source == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.kl[0]["estimator"] == "exact"
