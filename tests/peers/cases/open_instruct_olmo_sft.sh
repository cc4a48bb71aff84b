uv run python open_instruct/olmo_core_finetune.py --model_name_or_path small-base --learning_rate 5e-6 --num_epochs 2
