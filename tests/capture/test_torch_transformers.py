"""torch's own transformers and cumulative batch norms, whose code looks at values, are captured whole all the same."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import update_bn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning
from tests.by_hand import twins
from tests.layers import layers
from tests.relative_error import error
from tests.warned import without_warnings

# What torch says of nested tensors, which its encoders use where they infer, and of norm_first, which has none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested"),
    pytest.mark.filterwarnings("ignore:enable_nested"),
]

D, LENGTH = 16, 6
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
BAND = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-3)  # True: not seen
PADDED = torch.zeros(2, LENGTH, dtype=torch.bool)
PADDED[1, 4:] = True


def encoder(dropout=0.0, **options):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 32, dropout, **options), 1)


def as_autocast(make, *args, train=True, **kwargs):
    """One graph, whose output and gradients are as near to fp32's as autocast's."""
    torch.manual_seed(0)
    models = [make().train(train) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    plain, cast, ours = models
    plain.train(), cast.train()  # no dropout all the same, but for torch's inference path: NaN for some float masks
    amp_graph.convert(ours, "bf16")
    outs = []
    for model in models:
        with torch.autocast("cpu", torch.bfloat16, enabled=model is cast), torch.set_grad_enabled(train):
            outs.append(model(*args, **kwargs))
        if train:
            outs[-1].float().square().mean().backward()
    assert [g.break_reason for g in conversion_of(ours).graphs] == [""]
    assert conversion_of(ours).runs == 1
    assert 0 < error(outs[2], outs[0]) <= 1.1 * error(outs[1], outs[0]) + 1e-3
    if train:
        for p, q, r in zip(*(m.parameters() for m in models), strict=True):
            scale = p.grad.norm().clamp_min(1e-6)
            assert (r.grad - p.grad).norm() / scale <= 1.2 * (q.grad - p.grad).norm() / scale + 2e-2


X = torch.randn(2, LENGTH, D, generator=torch.Generator().manual_seed(1))
FIRST = {"batch_first": True}


MASKS = {
    "causal": {"mask": CAUSAL},
    "band": {"mask": BAND},
    "float": {"mask": torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))},
    "is_causal": {"mask": CAUSAL, "is_causal": True},
    "padded": {"mask": CAUSAL.isinf(), "src_key_padding_mask": PADDED},
    "of each head": {"mask": CAUSAL[None].expand(8, -1, -1)},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "train"), [*((name, True) for name in MASKS), ("causal", False), ("float", False)])
def test_an_encoder_with_a_mask_is_one_graph(name, train):
    as_autocast(lambda: encoder(**FIRST), X, train=train, **MASKS[name])


def test_a_decoder_with_a_mask_is_one_graph():
    as_autocast(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 4, 32, 0.0, **FIRST), 1),
        X,
        X * 0.5,
        tgt_mask=CAUSAL,
    )


@pytest.mark.parametrize(("options", "train"), [(FIRST, True), ({"norm_first": True}, False)])
def test_a_whole_transformer_is_one_graph(options, train):
    x = X if options.get("batch_first") else X.transpose(0, 1)
    padding = {"memory_key_padding_mask": PADDED, "src_key_padding_mask": PADDED}
    make = partial(nn.Transformer, D, 4, 1, 1, 32, 0.0, **options)
    as_autocast(make, x, x * 0.5, tgt_mask=CAUSAL.isinf(), train=train, **padding)


def test_the_mask_counts_at_each_call():
    """A mask of the same shape that is not causal any more, given to the same graph."""
    model = encoder(**FIRST).eval()
    plain = model(X, mask=BAND)
    amp_graph.convert(model, "bf16")
    model(X, mask=CAUSAL.isinf())
    assert error(model(X, mask=BAND), plain) < 2e-2
    assert len(conversion_of(model).graphs) == 1


def test_dropout_draws_where_fp32_draws():
    outs = []
    for model in twins(lambda: encoder(0.5, **FIRST)):
        torch.manual_seed(3)
        outs.append(model(X, mask=CAUSAL))
    assert error(outs[1], outs[0]) < 3e-2


@pytest.mark.filterwarnings("ignore:.*code that escapes capture fails")
def test_nested_tensors_of_the_inference_path():
    """Padding makes torch's encoder nest its input in evaluation, so that padded rows are 0: it runs as written."""
    model = encoder(**FIRST).eval()
    with torch.no_grad():
        plain = model(X, src_key_padding_mask=PADDED)
        amp_graph.convert(model, "bf16")
        with pytest.warns(AmpGraphWarning, match="nothing was captured"):
            found = model(X, src_key_padding_mask=PADDED)
    assert error(found, plain) < 2e-2


@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_with_its_weights(weights):
    model = nn.MultiheadAttention(D, 4, batch_first=True)
    plain, shown = model(X, X, X, attn_mask=CAUSAL, need_weights=weights)
    amp_graph.convert(model, "bf16")
    found, seen = model(X, X, X, attn_mask=CAUSAL, need_weights=weights)
    assert error(found, plain) < 2e-2
    assert (seen is None) == (shown is None)
    assert seen is None or error(seen, shown) < 2e-2
    assert len(conversion_of(model).graphs) == 1


# -- batch norms that average over all batches --------------------------------------------------------


def images():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


BATCHES = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(i)) * (i + 1) for i in range(3)]


@pytest.mark.filterwarnings("ignore:amp_graph. Sequential. nothing was captured")
def test_update_bn_of_a_converted_model():
    plain, ours = twins(images)
    for model in (plain, ours):
        update_bn(BATCHES, model)
    assert ours[1].num_batches_tracked == 3
    assert ours[1].running_mean.dtype is torch.float32
    assert error(ours[1].running_mean, plain[1].running_mean) < 1e-2
    assert error(ours[1].running_var, plain[1].running_var) < 1e-2
    assert error(ours.eval()(BATCHES[0]), plain.eval()(BATCHES[0])) < 2e-2


@pytest.mark.filterwarnings("ignore:amp_graph. BatchNorm1d. nothing was captured")
def test_a_cumulative_average_in_training():
    """Gradients, too, and the bits of the statistics where nothing is low."""
    plain, ours = twins(partial(nn.BatchNorm1d, 8, momentum=None))
    for batch in torch.randn(3, 5, 8):
        outs = [model(batch) for model in (plain, ours)]
        for out in outs:
            out.square().sum().backward()
        torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)
    torch.testing.assert_close(ours.running_mean, plain.running_mean)
    torch.testing.assert_close(ours.running_var, plain.running_var)


# -- packed sequences ---------------------------------------------------------------------------------


@layers(lambda: dict(rnn=nn.GRU(8, 16, batch_first=True), head=nn.Linear(16, 4)))
def Packed(self, x, lengths):
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
    return self.head(out)


def test_packed_sequences_compute_as_autocast_does():
    plain, ours = twins(Packed)
    x, lengths = torch.randn(3, 5, 8), torch.tensor([5, 3, 4])
    wanted = plain(x, lengths)
    with without_warnings(Warning):
        found = ours(x, lengths)
        found.square().mean().backward()
    assert error(found, wanted) < 2e-2
    wanted.square().mean().backward()
    assert error(ours.rnn.weight_ih_l0.grad, plain.rnn.weight_ih_l0.grad) < 3e-2
