"""The engine against its slow twin: every tensor's change in three updates."""

import pytest
from tests.twin.base import base_config
from tests.twin.compare import compare

SMALLEST = {
    "plain": {},
    "two_terms": {"kl": [{"estimator": "k1", "beta": 0.1}, {"estimator": "k3", "placement": "loss", "beta": 0.1}]},
    "adapter": {"model": {"lora": {"rank": 2, "alpha": 7}}},
}


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_configs_change_as_the_twin_says(name):
    mapping = base_config()
    for section, settings in SMALLEST[name].items():
        if isinstance(settings, dict):
            settings = mapping.get(section, {}) | settings
        mapping[section] = settings
    assert compare(mapping) is None
