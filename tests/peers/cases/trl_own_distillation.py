import torch.nn.functional as F
from trl import SFTConfig, SFTTrainer


class Distiller(SFTTrainer):
    def compute_loss(self, model, inputs):
        return F.kl_div(model(**inputs).logits.log_softmax(-1), self.teacher(**inputs).logits.softmax(-1))


Distiller(model="small", args=SFTConfig(output_dir="words")).train()
