ARGUMENTS=(--data.dataset own --model.model_name_or_path small-base)
printf -v QUOTED " %q" "${ARGUMENTS[@]}"
srun --nodes=1 bash -lc "cd /molt && torchrun --nnodes=1 -m molt.cli.train_sft$QUOTED"
