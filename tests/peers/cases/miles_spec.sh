ray job submit -- python3 "$ROOT/train.py" --spec miles_plugins.models.small get_spec --ref-load small --num-rollout 9 \
  --rollout-num-gpus-per-engine 1 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.02 --kl-loss-type k2
