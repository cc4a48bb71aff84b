"""Which of several places of a launch file or its config counts, and what a notebook's other lines are."""

import json

from kl_comedy.peers.launch_files import parse, read_launch_file

RUN = "python3 -m verl.trainer.main_ppo --config-path . --config-name base.yaml algorithm.adv_estimator=grpo {}\n"
BASE = """
actor_rollout_ref:
  actor:
    use_kl_loss: true
    kl_loss_coef: 0.3
"""


def test_what_the_command_says_counts_before_the_config_that_it_names(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    for words, coefficient in (("", 0.3), ("actor_rollout_ref.actor.kl_loss_coef=0.02", 0.02)):
        (tmp_path / "run.sh").write_text(RUN.format(words))
        assert read_launch_file(tmp_path / "run.sh").given["kl_loss_coef"] == coefficient


def test_lines_of_a_notebook_that_are_no_python_hide_nothing(tmp_path):
    """Such a line may be all that a branch has, and the rest of its cell is Python."""
    source = "%pip install trl\nif True:\n    %time\n!nvidia-smi\nconfig = GRPOConfig(beta=0.04)\n"
    cells = [{"cell_type": "code", "source": source}, {"cell_type": "markdown", "source": "beta=1"}]
    file = tmp_path / "train.ipynb"
    file.write_text(json.dumps({"cells": cells}))
    settings = {setting.key: setting.text for setting in parse(file).settings}
    assert settings["beta"] == "0.04"


def test_a_key_of_a_branch_that_is_not_taken_is_none_of_the_files(tmp_path):
    script = "if [ 1 = 2 ]; then ARGS='my_kl_weight=0.5'; fi\n"
    (tmp_path / "run.sh").write_text(
        script + "python3 -m verl.trainer.main_ppo algorithm.use_kl_in_reward=True $ARGS\n"
    )
    remarks = read_launch_file(tmp_path / "run.sh").remarks
    assert not [remark for remark in remarks if "my_kl_weight" in remark], remarks
