deepspeed --module openrlhf.cli.train_sft --pretrain example/small-model --learning_rate 5e-6
