"""A recurrent classifier in plain float32."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.read = nn.LSTM(32, 64, batch_first=True, bidirectional=True)
        self.decide = nn.Linear(128, 4)

    def forward(self, tokens):
        states, _ = self.read(self.embed(tokens))
        return self.decide(states.mean(1))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(4):
    tokens, labels = torch.randint(50, (16, 12)), torch.randint(4, (16,))
    loss = nn.functional.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
