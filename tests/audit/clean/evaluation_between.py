"""An RNN in bf16, and evaluation in fp32 under inference_mode after each step."""

import torch
from torch import nn

from tests.layers import layers


@layers(lambda: dict(embed=nn.Embedding(40, 16), rnn=nn.LSTM(16, 16, batch_first=True), out=nn.Linear(16, 3)))
def Classifier(self, tokens):
    return self.out(self.rnn(self.embed(tokens))[0][:, -1])


@torch.inference_mode()
def evaluate(model, tokens, labels):
    model.eval()
    right = (model(tokens).argmax(-1) == labels).float().mean().item()
    model.train()
    return right


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
tokens, labels = torch.randint(40, (16, 7)), torch.randint(3, (16,))
for _ in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), evaluate(model, tokens, labels))
