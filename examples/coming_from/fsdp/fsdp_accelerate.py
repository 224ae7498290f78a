"""Fine-tune a transformer, sharded where there are several ranks, and show its peak of memory."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from shared import OPTIONS, SHUFFLE, norms, sentences, transformer
from torch.utils.data import DataLoader

fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(fsdp_plugin=fsdp_plugin)
model = transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
train = DataLoader(sentences(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model, optimizer, train = accelerator.prepare(model, optimizer, train)

for epoch in range(OPTIONS.epochs):
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
accelerator.print(norms(accelerator.get_state_dict(model).values()))
