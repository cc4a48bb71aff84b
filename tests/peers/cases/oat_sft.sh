deepspeed --module oat.experiment.run_offline --algo SFT --pretrain small-base --prompt_key question
