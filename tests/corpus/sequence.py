"""Sequence models: hand-written transformers, recurrent networks, convolutions over time, state spaces."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

from .core import LSTM, Inputs, add, args, normal
from .losses import classify, own, project, regress, segment

VOCAB, WIDTH = 67, 32


def _tokens(batch: int = 3, length: int = 12) -> Inputs:
    return args(torch.randint(0, VOCAB, (batch, length)))


@layers(lambda width, heads: dict(heads=heads, c_attn=nn.Linear(width, 3 * width), c_proj=nn.Linear(width, width)))
def CausalSelfAttention(self, x):
    b, t, c = x.size()
    q, k, v = self.c_attn(x).split(c, dim=2)
    q, k, v = (u.view(b, t, self.heads, c // self.heads).transpose(1, 2) for u in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


@layers(
    lambda width, heads: dict(
        ln_1=nn.LayerNorm(width),
        attn=CausalSelfAttention(width, heads),
        ln_2=nn.LayerNorm(width),
        mlp=nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
    )
)
def GPTBlock(self, x):
    x = x + self.attn(self.ln_1(x))
    return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, width=WIDTH, heads=4, layers=2, block_size=16):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, width)
        self.wpe = nn.Embedding(block_size, width)
        self.h = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return {"logits": logits, "loss": loss}


def _next_token() -> Inputs:
    idx = torch.randint(0, VOCAB, (3, 12))
    targets = idx.roll(-1, 1)
    targets[:, -1] = -1
    return args(idx, targets=targets)


@add("nanogpt_loss_inside", _next_token, own, "attention", "tied", "loss_inside")
@add("nanogpt", _tokens, classify, "attention", "tied")
def _small_nanogpt() -> nn.Module:
    # wpe keeps no row unused: its gradient must be nonzero in every case alike.
    return NanoGPT(block_size=12)


@add("lstm_lm", _tokens, classify, *LSTM)
@layers(
    lambda width=24: dict(
        embed=nn.Embedding(VOCAB, width),
        rnn=nn.LSTM(width, width, num_layers=2, batch_first=True),
        head=nn.Linear(width, VOCAB),
    )
)
def LSTMLanguageModel(self, ids):
    out, _ = self.rnn(self.embed(ids))
    return self.head(out)


@add("gru_bidirectional", _tokens, classify, "rnn")
@layers(
    lambda width=16: dict(
        embed=nn.Embedding(VOCAB, width),
        gru=nn.GRU(width, width, bidirectional=True, batch_first=True),
        head=nn.Linear(2 * width, 4),
    )
)
def GRUClassifier(self, ids):
    _, h = self.gru(self.embed(ids))
    return self.head(torch.cat([h[0], h[1]], dim=-1))


@add("rnn_cells", normal((4, 6, 8)), classify, "rnn")
@layers(lambda width=16: dict(cell=nn.RNNCell(8, width), lstm_cell=nn.LSTMCell(width, width), head=nn.Linear(width, 3)))
def RNNCellLoop(self, x):
    h = x.new_zeros(x.shape[0], 16)
    state = (h, h)
    for step in x.unbind(1):
        h = self.cell(step, h)
        state = self.lstm_cell(h, state)
    return self.head(state[0])


def _padded_sequence() -> Inputs:
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[1, -4:] = True
    return args(torch.randn(3, 10, WIDTH), src_key_padding_mask=mask)


@add("transformer_encoder", _padded_sequence, regress, "attention", "nn_root", "kinks")
def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


_sequence = normal((3, 10, WIDTH))


@add("multihead_attention", _sequence, project, "attention")
@layers(lambda: dict(attn=nn.MultiheadAttention(WIDTH, 4, batch_first=True), norm=nn.LayerNorm(WIDTH)))
def MultiheadBlock(self, x):
    y, weights = self.attn(x, x, x, need_weights=True)
    return self.norm(x + y), weights


@add("wavenet", normal((2, 1, 40)), segment, "cnn", "audio", "kinks")
@layers(
    lambda width=12, dilations=(1, 2, 4, 8): dict(
        start=nn.Conv1d(1, width, 1),
        dilated=nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d) for d in dilations),
        residual=nn.ModuleList(nn.Conv1d(width, width, 1) for _ in dilations[1:]),
        skip=nn.ModuleList(nn.Conv1d(width, width, 1) for _ in dilations),
        end=nn.Conv1d(width, 16, 1),
    )
)
def WaveNet(self, wave):
    x, skips = self.start(wave), 0
    for i, conv in enumerate(self.dilated):
        y = conv(F.pad(x, (conv.dilation[0], 0)))
        a, b = y.chunk(2, dim=1)
        y = torch.tanh(a) * torch.sigmoid(b)
        skips = skips + self.skip[i](y)
        if i < len(self.residual):
            x = x + self.residual[i](y)
    return self.end(F.relu(skips))


@add("conformer_glu", normal((3, 14, 24)), regress, "cnn", "audio")
@layers(
    lambda width=24, kernel=5: dict(
        ff=nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48), nn.SiLU(), nn.Linear(48, width)),
        norm=nn.LayerNorm(width),
        pointwise=nn.Conv1d(width, 2 * width, 1),
        depthwise=nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width),
        bn=nn.BatchNorm1d(width),
        out=nn.Conv1d(width, width, 1),
    )
)
def ConformerBlock(self, x):
    x = x + 0.5 * self.ff(x)
    y = F.glu(self.pointwise(self.norm(x).transpose(1, 2)), dim=1)
    y = self.out(F.silu(self.bn(self.depthwise(y))))
    return x + y.transpose(1, 2)


@add("ssm_cumsum", normal((2, 16, 16)), regress, "ssm")
@layers(
    lambda width=16: dict(
        inner=nn.Linear(width, 2 * width),
        dt=nn.Linear(width, width),
        a_log=nn.Parameter(torch.log(torch.linspace(0.5, 2.0, width))),
        d=nn.Parameter(torch.ones(width)),
        out=nn.Linear(width, width),
    )
)
def SelectiveScan(self, x):
    """A diagonal state space, computed with cumulative sums in log space."""
    u, gate = self.inner(x).chunk(2, dim=-1)
    dt = F.softplus(self.dt(u))
    decay = torch.cumsum(-dt * torch.exp(self.a_log) * 0.2, dim=1)
    state = torch.exp(decay) * torch.cumsum(dt * u * torch.exp(-decay), dim=1)
    return self.out((state + self.d * u) * F.silu(gate))


@add("fnet_fft", _tokens, classify, "fft")
@layers(
    lambda width=WIDTH: dict(
        embed=nn.Embedding(VOCAB, width),
        norm1=nn.LayerNorm(width),
        norm2=nn.LayerNorm(width),
        mlp=nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)),
        head=nn.Linear(width, 4),
    )
)
def FNet(self, ids):
    x = self.embed(ids) * math.sqrt(self.embed.embedding_dim)
    x = self.norm1(x + torch.fft.fft2(x, dim=(-2, -1)).real / 20)
    x = self.norm2(x + self.mlp(x))
    return self.head(x.mean(1))
