KL=(--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3)
cd /root/miles && ray job submit -- python3 train.py --hf-checkpoint example/small --ref-load example/small "${KL[@]}"
