"""``kl-comedy sweep`` before anything runs: cells in which no KL acts are counted in one line."""

import pytest

from commands import run_here

K1_IN_LOSS = "{estimator: k1, placement: loss, beta: 0.1}"
K3_IN_LOSS = "{estimator: k3, placement: loss, beta: 0.1}"
K3_IN_REWARD = "{estimator: k3, placement: reward, beta: 0.1}"
TRUST_REGION = "{estimator: k3, placement: loss, reference: sampler}"


def test_cells_in_which_no_kl_acts_are_counted_in_one_line(tmp_path):
    # Each value with 1 and with 2 updates of a batch: fresh samples, and stale ones after the first update.
    grid = tmp_path / "grid.yaml"
    values = {
        "k3": [K3_IN_LOSS],
        "k1": [K1_IN_LOSS],
        "none": [],
        "cost": [K3_IN_REWARD],
        "two": [K1_IN_LOSS, K3_IN_LOSS],
        "trust": [TRUST_REGION],
    }
    lines = [f"    {name}: [{', '.join(terms)}]" for name, terms in values.items()]
    grid.write_text("\n".join(["base: quickstart", "grid:", "  kl:", *lines, "  algorithm.epochs_per_batch: [1, 2]"]))
    code, out, err = run_here("sweep", grid, "--dry-run", cwd=tmp_path)
    assert code == 0, err
    assert "12 cells" in " ".join(out.split())
    assert err == "warning: no KL acts in 4 of 12 cells (2-3,6-7), as in cell 2: k1 in the loss on fresh samples\n"


@pytest.mark.parametrize(
    "terms",
    [
        [K3_IN_LOSS.replace("0.1", "0.2"), K3_IN_LOSS],
        # A beta of 0 is a run without a KL, which somebody asked for.
        [K1_IN_LOSS.replace("0.1", "0"), K3_IN_LOSS],
    ],
    ids=["k3", "beta 0"],
)
def test_a_sweep_in_which_every_kl_acts_has_no_warning(terms, tmp_path):
    grid = tmp_path / "grid.yaml"
    values = [f"    value{number}: [{term}]" for number, term in enumerate(terms)]
    grid.write_text("\n".join(["base: quickstart", "grid:", "  kl:", *values]))
    code, _, err = run_here("sweep", grid, "algorithm.epochs_per_batch=2", "--dry-run", cwd=tmp_path)
    assert code == 0, err
    assert err == ""


def test_the_age_of_the_samples_is_in_the_words():
    lag = ("lag.mode=replayed", "lag.steps=1")
    code, _, err = run_here("sweep", "quickstart", f"kl=[{K1_IN_LOSS}]", *lag, "seed=0,1", "--dry-run")
    assert code == 0, err
    assert err == "warning: no KL acts in 2 of 2 cells (0-1), as in cell 0: k1 in the loss on stale samples\n"
