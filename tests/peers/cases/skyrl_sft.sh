uv run --isolated -m own.main_sft_plain strategy=fsdp model.path=small-base \
  optimizer_config.lr=1e-6 placement.num_gpus_per_node=1 fsdp_config.cpu_offload=false
