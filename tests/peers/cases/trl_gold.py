"""TRL's GOLD: distillation from a teacher; its beta mixes the directions of a Jensen-Shannon divergence."""

from trl.experimental.gold import GOLDConfig, GOLDTrainer

arguments = GOLDConfig(output_dir="out", beta=0.5, lmbda=1.0, num_generations=1)
GOLDTrainer(model="example/small-model", teacher_model="example/large-model", args=arguments, train_dataset=[]).train()
