from trl.experimental.ppo import PPOConfig, PPOTrainer

PPOTrainer(args=PPOConfig(output_dir="out", kl_estimator="k3"), model="small-base")
