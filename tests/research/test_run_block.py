"""The hours of a block, from the durations of its runs."""

import pandas as pd
from research.scripts.run_block import hours


def test_hours_are_of_all_runs_of_a_block():
    runs = pd.DataFrame(
        {
            "tags.sweep": ["hack_tune", "hack_tune", "centring"],
            "status": ["FINISHED", "FAILED", "FINISHED"],
            "duration_s": [3600.0, 1800.0, 900.0],
        }
    )
    rows = hours(runs).to_dict("records")
    assert rows == [
        {"block": "centring", "runs": 1, "finished": 1, "hours": 0.25},
        {"block": "hack_tune", "runs": 2, "finished": 1, "hours": 1.5},
    ]
