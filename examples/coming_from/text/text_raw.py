"""Fine-tune a transformer that classifies sentences."""

import torch
from shared import OPTIONS, SHUFFLE, norms, sentences, transformer
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = transformer()
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=24)
train = DataLoader(sentences(), batch_size=OPTIONS.size, shuffle=SHUFFLE)

model.train()
for epoch in range(OPTIONS.epochs):
    for batch in train:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
print(norms(model.parameters()))
