"""Encode texts with a sentence transformer, on as many devices as there are."""

import torch
from shared import encoder_folder, norms, passages
from transformers import AutoModel, AutoTokenizer

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tokenizer = AutoTokenizer.from_pretrained(encoder_folder())
encoder = AutoModel.from_pretrained(encoder_folder()).eval()
encoder.to(device)
texts = passages()


@torch.inference_mode()
def encode(texts):
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    return encoder(**tokens.to(device)).last_hidden_state[:, 0].cpu()


vectors = []
for start in range(0, len(texts), 8):
    vectors.extend(encode(texts[start : start + 8]))
print([len(vectors), *norms(vectors)])
