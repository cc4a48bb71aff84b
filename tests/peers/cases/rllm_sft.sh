python train_words_tinker.py model.name=small data.train_batch_size=8 data.rllm.tokenize_and_mask_method=stepwise \
  trainer.total_epochs=1 trainer.default_local_dir=/tmp/sft_words
