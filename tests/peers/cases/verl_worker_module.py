from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.workers.actor import DataParallelPPOActor


class MyActor(DataParallelPPOActor):
    def kl(self, new, ref, mask):
        penalty = kl_penalty(new, ref, kl_penalty=self.config.kl_loss_type)
        return agg_loss(penalty, mask, self.config.loss_agg_mode) * self.config.kl_loss_coef
