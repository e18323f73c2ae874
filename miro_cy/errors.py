"""The exception tree, under the engine's name. It lives in `miro_client.errors`, a leaf that both ends share."""

from miro_client.errors import (
    BadField,
    ConfigError,
    ContextOverflow,
    EngineClosed,
    InternalError,
    MiroError,
    ModelError,
    ModelFormatError,
    ModelNotFound,
    NonFinite,
    QueueFull,
    RequestError,
    RequestTimeout,
    Unschedulable,
    Unsupported,
    UnsupportedModel,
)

__all__ = [
    "BadField",
    "ConfigError",
    "ContextOverflow",
    "EngineClosed",
    "InternalError",
    "MiroError",
    "ModelError",
    "ModelFormatError",
    "ModelNotFound",
    "NonFinite",
    "QueueFull",
    "RequestError",
    "RequestTimeout",
    "Unschedulable",
    "Unsupported",
    "UnsupportedModel",
]
