"""Every config on the page "From a laptop to a cluster" is checked, as the page says."""

import re
import shlex
from pathlib import Path

import pytest

from kl_comedy.cli.check import what_starts
from kl_comedy.config import load_config
from kl_comedy.training.build import check_parts, check_training

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_laptop_to_cluster.md").read_text()
CHECKS = re.findall(r"^    kl-comedy check (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", CHECKS)
def test_a_check_on_the_page_passes(line):
    file, *words = shlex.split(line, comments=True)
    gpus = int(words.pop(words.index("--gpus") + 1)) if "--gpus" in words else 0
    config = load_config(ROOT / file, [word for word in words if "=" in word])
    check_training(config)
    check_parts(config)
    assert what_starts(config, gpus=gpus)["processes"].startswith(config.train.strategy)


def test_the_page_checks_what_it_trains_and_its_own_config_loads(tmp_path):
    checked = {line.split()[0] for line in CHECKS}
    trained = set(re.findall(r"^    kl-comedy train (\S+)", PAGE, re.MULTILINE))
    assert len(CHECKS) == 5 and trained <= checked
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_run.yaml").write_text(text.replace("extends: ", f"extends: {ROOT}/"))
    config = load_config(tmp_path / "my_run.yaml")
    assert config.model.source == "Qwen/Qwen2.5-0.5B-Instruct" and config.kl[0]["estimator"] == "exact"
