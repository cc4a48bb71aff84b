python mason.py --cluster here --workspace tests -- \
  python open_instruct/ppo_vllm_thread_ray_gtrl.py --model_name_or_path base --beta 0.03 \
  --total_episodes 1000 --reward_model_multiplier 0.0 --apply_verifiable_reward true
