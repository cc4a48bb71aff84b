uv run --isolated -m skyrl_train.entrypoints.main_generate generator.backend=vllm
