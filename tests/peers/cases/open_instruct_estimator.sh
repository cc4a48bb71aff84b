python mason.py --cluster a -- python open_instruct/grpo_fast.py --beta 0.001 --kl_estimator 3 --num_samples_per_prompt_rollout 8
