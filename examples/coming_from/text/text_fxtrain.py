"""Fine-tune a transformer that classifies sentences."""

import torch
from shared import OPTIONS, SHUFFLE, norms, sentences, transformer
from torch.utils.data import DataLoader

import fxtrain as fx

ctx, plan = fx.detect(), fx.Plan(clip_norm=1.0)
model = transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=24)
train = DataLoader(sentences(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model = fx.wrap(model, ctx, plan, optimizer=optimizer, scheduler=scheduler)

model.train()
for train in fx.shard(train, ctx, plan).epochs(OPTIONS.epochs):
    for batch in train:
        loss = model(**batch).loss
        fx.update(ctx, batch, model, loss)
fx.ops.say(norms(model.parameters()), ctx)
