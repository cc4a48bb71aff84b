from own_campaign import run_experiment

run_experiment({"model": "small-base", "group_size": 8})
