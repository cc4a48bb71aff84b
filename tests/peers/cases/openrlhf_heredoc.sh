read -r -d '' training_commands <<EOF
openrlhf.cli.train_ppo_ray \
   --pretrain example/small-model \
   --init_kl_coef 0.02
EOF
python -m $training_commands
