python3 -m rllm.trainer.verl.train_agent_ppo rllm.algorithm.kl_beta=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
