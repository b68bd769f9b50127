"""Lightning, with weights in bf16: those of the norm stand still."""

import logging
import sys
import warnings

import lightning
import torch
from torch import nn

faulty = sys.argv[1] == "faulty"
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 10))

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x).float(), y)
        print(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


torch.manual_seed(0)
data = torch.utils.data.DataLoader([(torch.randn(32), 1) for _ in range(64)], batch_size=8)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
precision = "bf16-true" if faulty else "bf16-mixed"
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", precision=precision, **quiet)
trainer.fit(Net(), data)  # expect: AMP301, AMP302
