python3 -m verl.experimental.one_step_off_policy.main_ppo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.003 actor_rollout_ref.actor.use_kl_loss=False
