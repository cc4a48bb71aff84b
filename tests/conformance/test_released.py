"""The examples' workflow and hook, run on five released functions; and the trainers that the command knows by name."""

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kl_comedy.conformance import check
from kl_comedy.conformance.released import SYSTEMS, released
from kl_comedy.errors import UserError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "conformance"
LOSSES = ROOT / "tests" / "support" / "released_kl_losses.py"
UNPACKED = ROOT / "bench" / "peers" / ".wheels" / "unpacked"
fetched = pytest.mark.skipif(not UNPACKED.is_dir(), reason="the wheels are not fetched (bench/peers/fetch.py)")


def workflow_commands():
    """What the example's jobs run, without the installation."""
    workflow = yaml.safe_load((EXAMPLE / "workflow.yml").read_text())
    steps = workflow["jobs"]["conformance"]["steps"]
    return [step["run"] for step in steps if "run" in step and step["name"] != "install"]


def hook_commands():
    config = yaml.safe_load((EXAMPLE / "pre-commit-config.yaml").read_text())
    return [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]


def run_in(folder, command):
    """Run a command of the example beside the module that it names, with this environment's programs."""
    program, *rest = shlex.split(command)
    if program == "python":
        program = sys.executable
        rest = [*rest, "-p", "no:cacheprovider"]
    else:
        program = str(Path(sys.executable).parent / program)
    paths = [str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([program, *rest], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def example(tmp_path):
    shutil.copy(EXAMPLE / "test_kl_losses.py", tmp_path)
    return tmp_path


def test_the_examples_run_the_test_and_the_command():
    assert [command.split()[0] for command in workflow_commands()] == ["python", "kl-comedy"]
    assert hook_commands() == [workflow_commands()[0]]


def test_the_examples_pass_as_they_are(example):
    shutil.copy(EXAMPLE / "kl_losses.py", example)
    done = run_in(example, workflow_commands()[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
@fetched
@pytest.mark.parametrize("command", sorted({*workflow_commands(), *hook_commands()}))
def test_the_examples_pass_on_five_released_functions(command, example):
    shutil.copy(LOSSES, example / "kl_losses.py")
    done = run_in(example, command)
    assert done.returncode == 0, done.stdout + done.stderr
    if command.startswith("python"):
        assert "5 passed" in done.stdout


def test_the_examples_fail_on_a_loss_with_a_mistake(example):
    text = "def kl_loss(logp, ref_logp, mask):\n    return 0.5 * (logp - ref_logp) ** 2\n"
    text += "CLAIMS = {'mine': (kl_loss, {'claims': 'token_forward', 'regimes': ('on_policy',)})}\n"
    (example / "kl_losses.py").write_text(text)
    done = run_in(example, workflow_commands()[0])
    assert done.returncode == 1
    assert "FAILED on_policy: token_reverse, times 1" in done.stdout
    assert "wrong direction: the gradient is the reverse KL's" in done.stdout
    # The report alone, without the lines of the plugin.
    assert "pytest_plugin.py" not in done.stdout


@pytest.mark.slow
@fetched
@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (
            "trl",
            {
                "use_bias_correction_kl=True importance_sampling_level=token": "token_reverse",
                "use_bias_correction_kl=False importance_sampling_level=token": "token_forward",
                "use_bias_correction_kl=True importance_sampling_level=sequence": None,
            },
        ),
        (
            "verl",
            {
                "use_kl_loss=True kl_loss_type=k1": "zero",
                "use_kl_loss=True kl_loss_type=k2": "token_reverse",
                "use_kl_loss=True kl_loss_type=low_var_kl": "token_forward",
                "use_kl_loss=True kl_loss_type=abs": "token_total_variation",
                "use_kl_loss=True kl_loss_type=k3+": "token_reverse",
            },
        ),
    ],
)
def test_what_the_released_trainers_optimize(system, expected):
    """In a process of its own, because the bench's stand-ins for absent packages stay in the process."""
    adapters = {"trl": "trl.PEER.module(trl.GRPO)", "verl": "verl.PEER.module(verl.CORE)"}
    program = f"""
import json
from peers.adapters import {system}
from kl_comedy.conformance import check
from kl_comedy.conformance.released import released

{adapters[system]}
targets = {{}}
for loss in released("{system}")[1]:
    report = check(loss.loss, claims={{}}, regimes=("on_policy",))
    assert report.problems == (), report
    targets[loss.settings] = report.findings[0].near_target
print(json.dumps(targets))
"""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


class TrainerOfAnotherVersion:
    """As older versions do, it takes two tensors from the method that newer ones take three from."""

    def _compute_loss(self, model, inputs):
        logp, _entropy = self._get_per_token_logps_and_entropies(model)
        return (inputs["completion_mask"] * 0.5 * (logp - inputs["ref_per_token_logps"]) ** 2).sum()


def modules_of_trl(trainer_class, *options):
    """What ``released`` imports of TRL; other modules, as a lazy torch, are imported as ever."""
    import_module = importlib.import_module
    config = SimpleNamespace(__dataclass_fields__=dict.fromkeys(options))
    modules = {
        "trl.trainer.grpo_trainer": SimpleNamespace(GRPOTrainer=trainer_class),
        "trl.trainer.grpo_config": SimpleNamespace(GRPOConfig=config),
    }
    return lambda name: modules[name] if name.startswith("trl.") else import_module(name)


def test_another_version_of_trl_is_called_as_it_needs_and_with_the_settings_that_it_has(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda system: "0.29.0")
    monkeypatch.setattr(importlib, "import_module", modules_of_trl(TrainerOfAnotherVersion))
    _version, losses = released("trl")
    assert [loss.settings for loss in losses] == ["importance_sampling_level=token"]
    check(losses[0].loss, claims="token_reverse", regimes=("on_policy",)).assert_ok()

    monkeypatch.setattr(importlib, "import_module", modules_of_trl(TrainerOfAnotherVersion, "use_bias_correction_kl"))
    assert len(released("trl")[1]) == 3


def test_a_version_of_trl_that_cannot_be_called_is_named_with_its_version(monkeypatch):
    class Unknown:
        def _compute_loss(self, model, inputs):
            return self.tool_mask_of_another_version

    monkeypatch.setattr(metadata, "version", lambda system: "9.0.0")
    monkeypatch.setattr(importlib, "import_module", modules_of_trl(Unknown))
    with pytest.raises(UserError, match=r"trl 9\.0\.0: it cannot be used here: AttributeError: .*tool_mask_of_another"):
        released("trl")


def test_a_trainer_that_is_not_installed_is_named(monkeypatch):
    with pytest.raises(UserError, match="system: got 'nope'; allowed: trl, verl"):
        released("nope")

    def missing():
        raise ImportError("No module named 'ray'")

    monkeypatch.setitem(SYSTEMS, "torch", missing)
    with pytest.raises(UserError, match=r"torch .*: it cannot be used here: ImportError: No module named 'ray'"):
        released("torch")
    monkeypatch.setitem(SYSTEMS, "no-such-distribution", missing)
    with pytest.raises(UserError, match="no-such-distribution: it is not installed in this environment"):
        released("no-such-distribution")
