export OUTPUT="$BASE/words"
swift rlhf --rlhf_type "$RLHF_TYPE" --reward_funcs $REWARDS --model small-base --beta 0.02
