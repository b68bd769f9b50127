"""An LSTM language model under bf16 autocast, with state that goes on, and clipped gradients."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, words=60, width=24):
        super().__init__()
        self.embed, self.drop = nn.Embedding(words, width), nn.Dropout(0.1)
        self.layers, self.head = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, words)
        self.head.weight = self.embed.weight

    def forward(self, tokens, state):
        out, state = self.layers(self.drop(self.embed(tokens)), state)
        return self.head(self.drop(out)), state


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text, state = torch.randint(60, (4, 200)), None
for start in range(0, 80, 16):
    x, y = text[:, start : start + 16], text[:, start + 1 : start + 17]
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(x, state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    state = tuple(s.detach() for s in state)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(f"{loss.item():.6f} perplexity {loss.exp().item():.4f}")
