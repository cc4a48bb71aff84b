"""The typed configuration: schema with its documentation, one validator, YAML and overrides, hashing."""

from kl_comedy.config.load import config_hash, config_reader, flatten, load_config, to_plain, to_yaml
from kl_comedy.config.schema import (
    SHARDED,
    AlgorithmConfig,
    AuditConfig,
    Config,
    DatasetConfig,
    EvalConfig,
    LagConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PromptConfig,
    RewardConfig,
    RolloutConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "SHARDED",
    "AlgorithmConfig",
    "AuditConfig",
    "Config",
    "DatasetConfig",
    "EvalConfig",
    "LagConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PromptConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrackingConfig",
    "TrainConfig",
    "config_hash",
    "config_reader",
    "flatten",
    "load_config",
    "to_plain",
    "to_yaml",
]
