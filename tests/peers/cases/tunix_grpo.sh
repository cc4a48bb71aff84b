python3 -m tunix.cli.grpo_main grpo_config.num_generations=2 grpo_config.beta=0.08
