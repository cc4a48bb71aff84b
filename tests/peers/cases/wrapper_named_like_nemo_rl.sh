export MODEL=small-base
bash ./examples/run_ppo.sh
