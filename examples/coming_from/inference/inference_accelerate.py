"""Encode texts with a sentence transformer, on as many devices as there are."""

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from shared import encoder_folder, norms, passages
from transformers import AutoModel, AutoTokenizer

state = PartialState()
tokenizer = AutoTokenizer.from_pretrained(encoder_folder())
encoder = AutoModel.from_pretrained(encoder_folder()).eval()
encoder.to(state.device)
texts = passages()


@torch.inference_mode()
def encode(texts):
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    return encoder(**tokens.to(state.device)).last_hidden_state[:, 0].cpu()


vectors = []
with state.split_between_processes(texts) as mine:
    for start in range(0, len(mine), 8):
        vectors.extend(encode(mine[start : start + 8]))
vectors = gather_object(vectors)
state.print([len(vectors), *norms(vectors)])
