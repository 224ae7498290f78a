"""Fine-tune a transformer, sharded where there are several ranks, and show its peak of memory."""

import torch
from shared import OPTIONS, SHUFFLE, norms, sentences, transformer
from torch.utils.data import DataLoader

import fxtrain as fx

ctx, plan = fx.detect(), fx.Plan(strategy="fsdp", clip_norm=1.0)
model = transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
train = DataLoader(sentences(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model = fx.wrap(model, ctx, plan, optimizer=optimizer)

for train in fx.shard(train, ctx, plan).epochs(OPTIONS.epochs):
    for batch in train:
        loss = model(**batch).loss
        fx.update(ctx, batch, model, loss)
    fx.ops.say(f"peak {fx.meters.memory(ctx).peak / 2**20:.0f} MiB", ctx)
fx.ops.say(norms(weight for _, weight in fx.weights(model)), ctx)
