export PORT="${PORT:-29500}"
torchrun --nproc_per_node 2 --master_port "$PORT" $(which swift) sft --model small-base --dataset own.jsonl
