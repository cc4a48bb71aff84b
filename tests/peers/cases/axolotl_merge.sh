axolotl merge-lora config.yml --lora-model-dir=out
