"""The typed configuration: schema, validator, YAML and overrides, hashing."""

from kl_comedy.config.load import (
    config_hash,
    config_reader,
    flatten,
    load_config,
    stored_text,
    to_plain,
    to_yaml,
)
from kl_comedy.config.schema import AlgorithmConfig, AuditConfig, Config, ModelConfig, OptimizerConfig

__all__ = [
    "AlgorithmConfig",
    "AuditConfig",
    "Config",
    "ModelConfig",
    "OptimizerConfig",
    "config_hash",
    "config_reader",
    "flatten",
    "load_config",
    "stored_text",
    "to_plain",
    "to_yaml",
]
