from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.dpo.dpo_pipeline import DPOPipeline

DPOPipeline(pipeline_config=DPOConfig()).run()
