"""float16 autocast with a scaler: a translator, batches that are accumulated, and gradients that are clipped."""

import torch
from torch import nn

from tests.layers import layers


@layers(
    lambda words=50, width=32: dict(
        source=nn.Embedding(words, width),
        target=nn.Embedding(words, width),
        core=nn.Transformer(width, 2, 1, 1, 64, 0.1, batch_first=True),
        head=nn.Linear(width, words),
    )
)
def Translator(self, source, target):
    mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
    return self.head(self.core(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))


model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(8):
    source, target = torch.randint(50, (4, 12)), torch.randint(50, (4, 11))
    with torch.autocast("cpu", torch.float16):
        logits = model(source, target[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), target[:, 1:], label_smoothing=0.1) / 2
    scaler.scale(loss).backward()
    print(loss.item())
    if step % 2:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
