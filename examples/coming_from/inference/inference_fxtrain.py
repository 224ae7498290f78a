"""Encode texts with a sentence transformer, on as many devices as there are."""

import torch
from shared import encoder_folder, norms, passages
from transformers import AutoModel, AutoTokenizer

import fxtrain as fx

ctx = fx.detect()
tokenizer = AutoTokenizer.from_pretrained(encoder_folder())
encoder = AutoModel.from_pretrained(encoder_folder()).eval()
encoder.to(ctx.device)
texts = passages()


@torch.inference_mode()
def encode(texts):
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    return encoder(**tokens.to(ctx.device)).last_hidden_state[:, 0].cpu()


vectors = fx.ops.map(encode, texts, ctx, batch=8)
fx.ops.say([len(vectors), *norms(vectors)], ctx)
