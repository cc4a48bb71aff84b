USE_KL=${USE_KL:-True}
if [ "$USE_KL" = "True" ]; then
    KL_ARGS="actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k2 actor_rollout_ref.actor.kl_loss_coef=0.005"
else
    KL_ARGS="actor_rollout_ref.actor.use_kl_loss=False"
fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo $KL_ARGS
