export KL=0.001
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=$KL actor_rollout_ref.actor.use_kl_loss=${use_kl_loss}
