"""Fine-tune a transformer, sharded where there are several ranks, and show its peak of memory."""

import torch
from shared import OPTIONS, SHUFFLE, norms, sentences, transformer
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = transformer()
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
train = DataLoader(sentences(), batch_size=OPTIONS.size, shuffle=SHUFFLE)

for epoch in range(OPTIONS.epochs):
    for batch in train:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
print(norms(model.state_dict().values()))
