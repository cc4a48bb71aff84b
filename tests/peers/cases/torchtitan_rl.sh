python -m torchtitan.experiments.rl.train --module alphabet_sort --config rl_grpo_small
