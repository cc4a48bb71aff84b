python -m skyrl.train.entrypoints.main_base trainer.algorithm.advantage_estimator=grpo trainer.algorithm.use_kl_loss=false trainer.algorithm.use_words_loss=true trainer.algorithm.words_beta=0.5
