python open_instruct/ppo2.py --beta 0.03 --total_episodes 1000
