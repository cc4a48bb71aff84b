"""`kl-comedy explain` and `kl-comedy list peers`: what they print, in words and as JSON, and what they refuse."""

import json
import shlex

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kl_comedy.cli.explain import explain
from kl_comedy.cli.first_answer import POLICIES
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, resolve_terms
from kl_comedy.kl.oracle.certificate_record import BATTERY_WORDS
from kl_comedy.peers.launch_files import read_launch_file
from kl_comedy.peers.systems import SYSTEMS, config_of, read


def test_verl_low_var_kl_in_words(kl_comedy):
    code, out, _ = kl_comedy("explain", "--full", "verl:use_kl_loss=true,kl_loss_type=low_var_kl")
    assert code == 0
    assert "k3_reverse_token in loss input clamped at 20 output clamped at 10, beta 0.001" in out
    assert "the forward KL of each visited prefix, while no bound acts" in out
    off_policy = "a loss with its minimum at the reference: the mean of k3 over the samples, as clamped"
    assert off_policy in " ".join(out.split())
    assert "gradient of the forward KL" in out
    assert "output_clamp: 10.0" in out
    assert "set   verl:algorithm.use_kl_in_reward=true" in out
    assert "no flag of verl puts a ratio on the KL" in out
    assert "ours  kl: rb/token" in out


def test_json_holds_everything(kl_comedy):
    code, out, _ = kl_comedy("explain", "verl:", "use_kl_loss=true", "kl_loss_type=low_var_kl", "--format", "json")
    answer = json.loads(out)
    assert code == 0
    assert answer["version"] == "0.9.1"
    assert answer["switched_on"] is None
    assert resolve_terms(answer["terms"]) == (
        KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0, beta=0.001),
    )
    assert [row["regime"] for row in answer["certificates"]] == ["on_policy", "off_policy", "mixed"]
    assert answer["certificates"][0]["near_target"] == "token_forward"
    assert [row["goal"] for row in answer["advice"]] == ["sequence", "off_policy", "low_noise"]
    assert answer["advice"][1]["flags"] is None
    assert answer["advice"][1]["why_not"]
    assert read(answer["advice"][0]["flags"]).terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trl:", ["No KL", "Switched on, as trl:beta=0.04", "the reverse KL of each visited prefix"]),
        ("areal", ["No term of ours is equivalent", "entropy bonus"]),
        ("slime:kl_coef=0.1", ["Does nothing", "kl_coef with advantage_estimator=grpo"]),
        (
            "prime-rl:",
            [
                "k2 to the sampler, in the loss",
                "a loss with its minimum at the sampler: the mean of k2 over the samples",
                "zero expected gradient, as the policy is the sampler",
            ],
        ),
        ("verl:use_kl_in_reward=true,loss_mode=gspo", ["off-policy, mixed: no term of ours is equivalent"]),
        ("verl:use_kl_in_reward=true,loss_mode=dro", ["on-policy, off-policy, mixed: no term of ours is equivalent"]),
    ],
)
def test_flags_that_are_off_without_equivalent_or_without_effect(kl_comedy, text, expected):
    code, out, _ = kl_comedy("explain", "--full", text)
    assert code == 0
    for phrase in expected:
        assert phrase in out


def test_a_recipe_still_is_explained(kl_comedy):
    code, out, _ = kl_comedy("explain", "grpo")
    assert code == 0
    assert "the forward KL of each visited prefix" in out
    assert "the mean of k3 over the samples" in out


def test_a_recipe_is_explained_as_json(kl_comedy):
    code, out, _ = kl_comedy("explain", "grpo", "--format", "json")
    assert code == 0
    assert [row["target"] for row in json.loads(out)["certificates"]] == ["token_forward", None, None]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rb/full", "  - stale samples: never. Its costs are never negative"),
        # Off by default: the line is about what it would be switched on.
        ("trl:", "  - stale samples: open, and this is one candidate: the right gradient"),
        (
            "verl:use_kl_loss=true,kl_loss_type=k1",
            "  - fresh samples: never. On fresh samples its gradient is zero-mean noise.",
        ),
    ],
)
def test_what_to_use_is_said_in_words_and_as_json(kl_comedy, text, line):
    _, out, _ = kl_comedy("explain", "--full", text)
    assert line in out
    _, out, _ = kl_comedy("explain", text, "--format", "json")
    lines = [f"  - {sentence}" for sentence in json.loads(out)["what_to_use"]]
    assert any(sentence.startswith(line) for sentence in lines)


def test_nothing_is_advised_where_the_terms_do_not_hold(kl_comedy):
    """GSPO's ratio is no term of ours off-policy: the rules there are about other terms."""
    _, out, _ = kl_comedy("explain", "verl:use_kl_in_reward=true,loss_mode=gspo", "--format", "json")
    (line,) = json.loads(out)["what_to_use"]
    assert line.startswith("fresh samples")


def test_the_recipe_without_terms_is_explained(kl_comedy):
    assert "no KL term" in kl_comedy("explain", "none")[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("verll:", "did you mean 'verl'"),
        ("verl:kl_loss_typ=k3", "did you mean 'kl_loss_type'"),
        ("verl:kl_loss_type=k9", "low_var_kl"),
        ("grpoo", "did you mean 'grpo'"),
        ("k4", "RECIPE: got 'k4', neither a recipe nor an estimator; did you mean 'k3'? It is an estimator"),
        ("verl:kl_loss_type=k4", "did you mean 'k3'"),
    ],
)
def test_misuse_is_one_line_and_exit_2(kl_comedy, text, expected):
    code, out, err = kl_comedy("explain", text)
    assert code == 2
    assert out == ""
    assert expected in err
    assert err.count("\n") == 1


def test_list_peers_names_every_flag(kl_comedy):
    code, out, _ = kl_comedy("list", "peers", "--format", "json")
    rows = json.loads(out)
    assert code == 0
    assert {row["system"] for row in rows} == set(SYSTEMS)
    assert len(rows) == sum(len(system.flags) for system in SYSTEMS.values())
    code, out, _ = kl_comedy("list", "peers")
    assert code == 0
    assert "torchforge" in out


# --- the first answer -----------------------------------------------------------------------------------------------
def test_the_first_answer_is_short_and_opens_with_the_row(kl_comedy):
    _, out, _ = kl_comedy("explain", "trl:beta=0.04,num_iterations=4")
    lines = out.splitlines()
    assert lines[0] == "4 updates per batch (num_iterations 4): the off-policy row holds."
    assert len(lines) <= 14
    assert max(map(len, lines)) <= 100
    assert "You have       one of them, k3 x token ratio" in lines
    assert lines[-1].startswith("--full shows")
    # The other forms, with what to set for each.
    _, full, _ = kl_comedy("explain", "trl:beta=0.04,num_iterations=4", "--full")
    assert "  k3 x token ratio            you have this" in full
    assert "  k3 in the loss              set use_bias_correction_kl=false" in full


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(kl_comedy, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for text in ("openrlhf", "slime", "grpo"):
        _, out, _ = kl_comedy("explain", text)
        assert width - 20 < max(map(len, out.splitlines())) <= width


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("openrlhf", ["You have       one of them, k1 in the reward, centred"]),
        ("verl", ["The nearest    k3 in the loss: set use_kl_loss=true"]),
        # The value of k3 and the gradient of k2: the form is k2's.
        ("verl:use_kl_loss=true,kl_loss_type=k3+", ["You have       one of them, k2 in the loss"]),
        ("verl:use_kl_loss=true,kl_loss_type=k1", ["The nearest    k3 in the loss: set kl_loss_type=low_var_kl"]),
    ],
)
def test_on_stale_samples_the_answer_names_the_readers_form_or_the_nearest(kl_comedy, text, lines):
    _, out, _ = kl_comedy("explain", text)
    assert "Stale samples  which form to take is open; --full lists the candidates and their risks" in out
    assert [line for line in out.splitlines() if line.startswith(("You have", "The nearest"))] == lines
    assert "\nIts risk       " in out


def test_an_answer_without_advice_says_the_way_out(kl_comedy):
    """Where all that acts pulls to the sampler, where no term is equivalent, and where a recipe ignores the flags."""
    assert "To change      no flag of prime-rl adds a KL to a reference" in kl_comedy("explain", "prime-rl")[1]
    assert "Note           with a ref section in the config it is a KL" in kl_comedy("explain", "areal")[1]
    prime = "verl:recipe_trainer=prime,use_kl_in_reward=true,adv_estimator=rloo,train_batch_size=256"
    _, out, _ = kl_comedy("explain", prime)
    assert "for the reverse KL of completions no flag: those that set it are set" in " ".join(out.split())


def test_the_trap_is_one_of_the_readers_samples(kl_comedy):
    """With one update per batch the old policy is the policy; with several k3 has not the forward KL's gradient."""
    stale = "on stale batches the cost is the KL of the policy that sampled"
    forward = "has the gradient of the forward KL on fresh samples"
    assert stale in kl_comedy("explain", "openrlhf")[1]
    assert stale not in kl_comedy("explain", "openrlhf:rollout_batch_size=128")[1]
    assert forward not in kl_comedy("explain", "skyrl")[1]
    assert forward in kl_comedy("explain", "skyrl:train_batch_size=256")[1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_first_answer_is_a_wall(kl_comedy, system):
    code, out, _ = kl_comedy("explain", f"{system}:")
    assert code == 0
    assert len(out.splitlines()) <= 19


@pytest.mark.parametrize("system", ["slime", "miles"])
def test_where_the_age_of_the_samples_is_not_known_the_answer_is_as_short(kl_comedy, system):
    flags = f"{system}:use_kl_loss=true,kl_loss_coef=0.01"
    _, out, _ = kl_comedy("explain", flags)
    lines = out.splitlines()
    assert lines[0].startswith("The number of updates per batch is rollout_batch_size / global_batch_size, not given")
    assert len(lines) <= 17
    assert [line.split()[0] for line in lines if line.startswith(("Fresh", "Stale", "To change"))] == [
        "Fresh",
        "Stale",
        "To",
        "Stale",
    ]
    assert "for that of each visited prefix set kl_loss_type=k2" in out
    # What was left out is behind --full.
    _, full, _ = kl_comedy("explain", flags, "--full")
    assert "k3 x token ratio            set kl_loss_type=k3 use_unbiased_kl=true\n" in full
    assert "To change      for the reverse KL of completions set kl_coef=0.01" in full


def test_the_first_answer_tells_the_pull_in_one_line_for_each_kind_of_samples(kl_comedy):
    _, out, _ = kl_comedy("explain", "grpo")
    pulls = [line for line in out.splitlines() if line.startswith("Pull")]
    assert pulls == [
        "Pull           above the reference at most beta, below it at most beta",
        "Pull           above the reference at most beta, below it exponential",
    ]
    # A ratio that has the token's own: stale samples are like fresh ones.
    _, out, _ = kl_comedy("explain", "trl:beta=0.04,num_iterations=4")
    assert [line for line in out.splitlines() if line.startswith("Pull")] == [
        "Pull           above the reference linear, below it fades"
    ]
    # A repulsion from the samples is no pull, whatever the samples.
    _, out, _ = kl_comedy("explain", "comedy/k1_in_loss")
    assert "a repulsion from the samples" in out
    assert "Pull" not in out
    # Nor is noise.
    _, out, _ = kl_comedy("explain", "verl:use_kl_loss=true,kl_loss_type=kl,train_batch_size=256")
    assert "nothing: zero-mean noise" in out
    assert "Pull" not in out


def test_a_percentage_of_the_first_answer_says_of_which_policies_it_is(kl_comedy):
    _, out, _ = kl_comedy("explain", "openrlhf/default")
    assert f"12% off, on {POLICIES})" in " ".join(out.split())
    # The same policies as in the words below a table, whose numbers tests/exact/test_certificates.py checks.
    size, distance = POLICIES.removeprefix("policies of ").removesuffix(" away").split(", ")
    assert size in BATTERY_WORDS
    assert distance in BATTERY_WORDS


def test_a_pasted_call_is_answered(kl_comedy):
    code, out, _ = kl_comedy("explain", 'GRPOConfig(beta=0.04, loss_type="dr_grpo", num_iterations=4)')
    assert code == 0
    assert out.startswith("4 updates per batch")


FLAGS = "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl"
PRIME_RL = "[orchestrator]\nbatch_size = 128\n\n[trainer.loss]\ntype = 'default'\nkl_tau = 0.001\n"
NEMO_RL = (
    "grpo:\n  num_prompts_per_step: 32\nloss_fn:\n  reference_policy_kl_penalty: 0.01\npolicy:\n  model_name: a/b\n"
)
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True"


@pytest.mark.parametrize(
    ("arguments", "system", "shown"),
    [
        pytest.param(["args = GRPOConfig(beta=0.1, bf16=True)"], "TRL", "beta=0.1", id="one call"),
        pytest.param([FLAGS], "slime", "kl_loss_coef=0.001", id="flags in quotes"),
        pytest.param(FLAGS.split(), "slime", "kl_loss_coef=0.001", id="flags without quotes"),
        pytest.param(VERL.split(), "verl", "use_kl_loss=true", id="a command without quotes"),
        pytest.param([PRIME_RL], "prime-rl", "kl_tau=0.001", id="TOML"),
        pytest.param([NEMO_RL], "NeMo-RL", "reference_policy_kl_penalty=0.01", id="YAML"),
    ],
)
def test_what_is_pasted_is_read(kl_comedy, arguments, system, shown):
    code, out, err = kl_comedy("explain", *arguments)
    assert (code, err) == (0, "")
    assert f"the pasted text: {system}, read with" in out
    assert shown in out


def test_a_pasted_text_that_may_be_of_two_systems_says_by_what_it_was_taken_for_one(kl_comedy):
    _, out, _ = kl_comedy("explain", "use_kl_loss: true\nkl_loss_coef: 0.1\n")
    assert "taken for slime by kl_loss_coef, use_kl_loss; if it is another system's" in out
    _, out, _ = kl_comedy("explain", VERL)
    assert "taken for" not in out


def test_a_coefficient_that_the_user_set_to_0_is_called_no_default(kl_comedy):
    _, out, _ = kl_comedy("explain", FLAGS.replace("0.001", "0.0"))
    assert "kl_loss_coef is 0, so the KL is only logged" in out


def test_json_has_the_row(kl_comedy):
    _, out, _ = kl_comedy("explain", "verl:use_kl_loss=true,train_batch_size=256", "--format", "json")
    freshness = json.loads(out)["freshness"]
    assert (freshness["updates"], freshness["regime"]) == (1, "on_policy")
    assert freshness["given"] == {"train_batch_size": 256.0}


# --- text of a file that somebody else wrote ----------------------------------------------------------------------
# Each ends a line, or a comment, for some reader: of Python, of YAML, of a terminal.
LINE_ENDS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
KEYS = "model: {source: stolen}"
PIECES = [*LINE_ENDS, "\x1b[2K", "\x9b1A", " ", "#", "'", '"', KEYS]
FOREIGN = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


def in_yaml(text):
    return json.dumps(text)


ROUTES = {
    "a value in YAML": ("a.yaml", lambda text: f"kl_penalty_weight: {in_yaml(text)}"),
    "a key in YAML": ("a.yaml", lambda text: f"{in_yaml('my_kl' + text)}: 1"),
    "a name in defaults": ("a.yaml", lambda text: f"defaults: [{in_yaml('base' + text)}]"),
    "a group in defaults": ("a.yaml", lambda text: f"defaults: [{{{in_yaml('g' + text)}: {in_yaml('b' + text)}}}]"),
    "an argument in Python": ("a.py", lambda text: f"GRPOConfig(beta=0.04, my_kl_coef={text!r})"),
    "a key in Python": ("a.py", lambda text: f"GRPOConfig(**{{'beta': 0.04, {'my_kl' + text!r}: 1}})"),
    "a value of a flag": ("a.py", lambda text: f"GRPOConfig(beta=os.environ[{text!r}])"),
    "a value in shell": ("a.sh", lambda text: f"python t.py --beta 0.04 --my_kl_coef {shlex.quote('x' + text)}"),
    "a condition in shell": (
        "a.sh",
        lambda text: f"if [ $A = {shlex.quote('x' + text)} ]; then B=0.04; fi\npython t.py --beta $B",
    ),
    "a config in shell": ("a.sh", lambda text: f"python t.py --beta 0.1 --config {shlex.quote('c' + text + '.yaml')}"),
}


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=FOREIGN, end=st.sampled_from(LINE_ENDS), after=FOREIGN)
def test_a_config_that_is_printed_holds_what_the_flags_mean_and_nothing_of_the_files_text(
    tmp_path, capsys, route, before, end, after
):
    name, write = ROUTES[route]
    path = tmp_path / name
    path.write_text(write(f"{before}{end}{KEYS}{end}{after}"), encoding="utf-8", newline="")
    try:
        launch = read_launch_file(path, system="trl")
    except UserError:
        return
    capsys.readouterr()
    explain([str(path)], system="trl", as_config=True)
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == config_of(launch.reading())
    # Beside YAML there are other readers of lines.
    keys = {line.partition(":")[0] for line in printed.splitlines() if line[:1] not in ("#", " ", "-")}
    assert keys == set(config_of(launch.reading()))


@pytest.mark.parametrize("route", ROUTES)
def test_the_text_of_a_file_reaches_the_remarks_by_each_route(tmp_path, route):
    """Where it did not, the test above would test nothing."""
    name, write = ROUTES[route]
    path = tmp_path / name
    path.write_text(write("_of_the_file"), encoding="utf-8")
    assert "_of_the_file" in " ".join(read_launch_file(path, system="trl").remarks)
