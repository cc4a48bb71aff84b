from hydra import compose
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline

RLVRPipeline(pipeline_config=compose(config_name="own_plan")).run()
