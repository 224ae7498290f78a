"""Training that continues while replicas die and join, without a restart, by torchft's protocol."""

from fxtrain.replicas.members import Replicas
from fxtrain.replicas.training import Update, train

__all__ = ["Replicas", "Update", "train"]
__dir__ = __all__.copy  # for completion
