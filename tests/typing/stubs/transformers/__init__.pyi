# What examples use of transformers, whose own types are incomplete.
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

AutoModel: Any
AutoModelForSequenceClassification: Any
AutoTokenizer: Any
LlamaConfig: Any
T5Config: Any
T5ForConditionalGeneration: Any

class LlamaForCausalLM(Module):
    def __init__(self, config: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int
) -> LambdaLR: ...
