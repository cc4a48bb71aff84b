swift rlhf --rlhf_type gkd --model example/small-model --teacher_model example/large-model --beta 0.5
