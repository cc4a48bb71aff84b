python -m verl.trainer.main_ppo actor_rollout_ref.actor.loss_mode=kl_cov actor_rollout_ref.actor.k_percent=0.2 actor_rollout_ref.actor.ppo_kl_coef=0.7
