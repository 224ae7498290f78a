"""Fine-tune a transformer that classifies sentences."""

import torch
from accelerate import Accelerator
from shared import OPTIONS, SHUFFLE, norms, sentences, transformer
from torch.utils.data import DataLoader

accelerator = Accelerator(step_scheduler_with_optimizer=False)
model = transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=24)
train = DataLoader(sentences(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model, optimizer, scheduler, train = accelerator.prepare(model, optimizer, scheduler, train)

model.train()
for epoch in range(OPTIONS.epochs):
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.print(norms(model.parameters()))
