"""Attention written out in Python becomes the one call, and is nearer to fp64; what only looks like it stays."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.attention import attention_kernel, dropout_bits
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.backends.cpu.loss import fuse_cross_entropy
from amp_graph.passes.graph import call_arguments
from amp_graph.passes.graph.graph_text import graph_text
from tests.corpus import make
from tests.layers import forward_of, layers
from tests.passes.graphs import Function
from tests.relative_error import errors

pytestmark = pytest.mark.skipif(attention_kernel.library() is None, reason="needs AVX512_BF16 and a C compiler")
LENGTH, WIDTH, HEADS = 12, 32, 4


@pytest.fixture(autouse=True)
def _a_machine_where_it_is_profitable(monkeypatch):
    monkeypatch.setattr(call_arguments, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(call_arguments, "cpu_has_amx", lambda: False)
    monkeypatch.setattr(fuse_cross_entropy, "multiplies_bf16", lambda: True)


SEEN = torch.ones(LENGTH, LENGTH).tril().bool()
MASK = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~SEEN, torch.finfo(torch.float32).min)


def plain(s, q, k, v):
    return (q @ k.mT * 0.4).softmax(-1) @ v


def bert(s, q, k, v):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.4 + MASK
    chances = F.dropout(F.softmax(scores, dim=-1), p=0.1, training=False)
    return torch.matmul(chances, v).transpose(1, 2).contiguous().transpose(1, 2)


def llama(s, q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.4 + MASK[0, 0]
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def nanogpt(s, q, k, v):
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
    scores = scores.masked_fill(SEEN == 0, float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), 0.0) @ v


def folded(*heads):
    return [t.reshape(-1, *t.shape[2:]) for t in heads]


def bloom(s, q, k, v):
    """Heads are in the batch for the products only; what ``baddbmm`` adds differs from head to head."""
    queries, keys, values = folded(q, k, v)
    scores = ALIBI.repeat(2, 1, 1).to(q).baddbmm(batch1=queries, batch2=keys.transpose(-1, -2), beta=1.0, alpha=0.4)
    scores = scores.view(2, HEADS, LENGTH, -1) + MASK
    chances = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype).view(-1, LENGTH, LENGTH)
    return torch.bmm(chances, values).view(2, HEADS, LENGTH, -1)


def bart(s, q, k, v, p=0.1, training=False):
    """Heads are in the batch, but for the mask."""
    queries, keys, values = folded(q * 0.4, k, v)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(2, HEADS, LENGTH, LENGTH) + MASK
    chances = F.dropout(F.softmax(scores.view(-1, LENGTH, LENGTH), dim=-1), p=p, training=training)
    return torch.bmm(chances, values).view(2, HEADS, LENGTH, -1)


def multihead(s, q, k, v):
    """Heads are in the batch, also for the mask and what reads the result."""
    queries, keys, values = folded(q, k, v)
    scores = torch.baddbmm(MASK[0].expand(2 * HEADS, -1, -1).to(q), queries, keys.mT)
    return torch.bmm(scores.softmax(-1), values).unflatten(0, (2, HEADS))


def falcon(s, q, k, v):
    """Scaled behind a mask that differs from head to head; behind that comes another one."""
    scores = (q @ k.mT + ALIBI.to(q)) * 0.4
    return F.softmax(scores + MASK.to(q), dim=-1) @ v


def mpt(s, q, k, v):
    """A mask of three dimensions, and one of what is hidden."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.4 + ALIBI[:, 0:, -LENGTH:].to(q)
    scores = scores.masked_fill(~SEEN, -math.inf)
    return torch.matmul(F.softmax(scores.float(), dim=-1).to(v), v)


def in_place(s, q, k, v):
    """What each returns is read on; a bias is added so, too."""
    scores = (q @ k.mT).div_(2.5)
    scores += ALIBI
    return scores.masked_fill_(~SEEN, -math.inf).softmax(-1) @ v


def scaled_behind_a_product(s, q, k, v):
    queries, keys, values = folded(q, k, v)
    scores = torch.baddbmm(ALIBI.repeat(2, 1, 1).to(q), queries, keys.mT, beta=0.5) * 0.4
    return torch.bmm(scores.softmax(-1), values).unflatten(0, (2, HEADS))


def dropped(s, q, k, v):
    return F.dropout((q @ k.mT * 0.4).softmax(-1), 0.25) @ v


def llama_that_drops(s, q, k, v):
    """Its values come of what draws before the dropout does."""
    chances = F.softmax(q @ k.mT * 0.4 + MASK, dim=-1, dtype=torch.float32).to(q.dtype)
    values = F.dropout(v, 0.5)
    return F.dropout(chances, 0.1, True) @ values


ALIBI = torch.linspace(-2, 2, HEADS * LENGTH).view(HEADS, 1, LENGTH)
PADDED = torch.arange(LENGTH) < 3  # left of the text
OF_MODELS = (bert, llama, nanogpt, bloom, bart, multihead, falcon, mpt)
DROPPED = {
    "dropped": dropped,
    "bart_that_drops": partial(bart, p=0.5, training=True),
    "llama_that_drops": llama_that_drops,
}
FORMS = {f.__name__: f for f in (in_place, plain, *OF_MODELS, scaled_behind_a_product)}
FORMS |= {
    "turned_before": lambda s, q, k, v: F.softmax(0.4 * (q / 1.5 @ k.permute(0, 1, 3, 2).clone()), -1) @ v,
    "mask_first": lambda s, q, k, v: (MASK + q @ k.mT).softmax(3) @ v,
    "of_one_item": lambda s, q, k, v: ((q[0] @ k[0].mT * 0.4 + MASK[0]).softmax(-1) @ v[0])[None],
    "two_masks": lambda s, q, k, v: (q @ k.mT * 0.4 + MASK.to(q) + ALIBI.to(q)).softmax(-1) @ v,
}


def with_chances(s, q, k, v):
    chances = (q @ k.mT * 0.4).softmax(-1)
    return chances @ v + chances.sum()


def written(s, q, k, v):
    v = v * 1
    chances = (q @ k.mT).softmax(-1)
    v += 1
    return chances @ v


def drawn_half_way(s, q, k, v):
    chances = F.dropout((q @ k.mT).softmax(-1), 0.5)
    return chances @ (v * torch.rand(LENGTH, 1))


def read_before_it_is_written(s, q, k, v):
    scores = q @ k.mT
    before = scores.detach().view(-1)
    chances = scores.mul_(0.4).softmax(-1)
    return chances @ v + before.mean()


def mask_that_is_written(s, q, k, v):
    mask = MASK * 1
    scores = q @ k.mT + mask
    mask += 1
    return scores.softmax(-1) @ v + mask.sum()


def held_by_the_user(s, q, k, v):
    with torch.autocast("cpu", enabled=False):
        scores = q.float() @ k.float().mT
    return scores.softmax(-1) @ v


OTHERS = {
    "the probabilities are read": with_chances,
    "all is dropped": lambda s, q, k, v: F.dropout((q @ k.mT).softmax(-1), 1.0) @ v,
    "dropout before others draw": drawn_half_way,
    "dropout in the order of keys": lambda s, q, k, v: F.dropout((k @ q.mT).mT.softmax(-1), 0.5) @ v,
    "dropout twice": lambda s, q, k, v: F.dropout(F.dropout((q @ k.mT).softmax(-1), 0.5), 0.5) @ v,
    "over the queries": lambda s, q, k, v: (q @ k.mT).softmax(-2) @ v,
    "a mask that trains": lambda s, q, k, v: (q @ k.mT + s.bias).softmax(-1) @ v,
    "a product adds what trains": lambda s, q, k, v: torch.baddbmm(s.bias, *folded(q, k.mT)).softmax(-1) @ folded(v)[0],
    "heads apart for another number of them": lambda s, q, k, v: (
        (torch.bmm(*folded(q, k.mT)).view(4, 2, LENGTH, LENGTH) + MASK).view(2, HEADS, LENGTH, LENGTH).softmax(-1) @ v
    ),
    "scores of what is seen": lambda s, q, k, v: torch.where(SEEN, q @ k.mT, -math.inf).softmax(-1) @ v,
    "scores where they are not seen": lambda s, q, k, v: torch.where(~SEEN, -1e9, q @ k.mT).softmax(-1) @ v,
    "a mask behind what was filled": lambda s, q, k, v: ((q @ k.mT).masked_fill(~SEEN, -1e9) + MASK).softmax(-1) @ v,
    "a number fills that scores may have": lambda s, q, k, v: (q @ k.mT).masked_fill(~SEEN, -3.0).softmax(-1) @ v,
    "scores of a function": lambda s, q, k, v: (q @ k.mT).tanh().softmax(-1) @ v,
    "on the left": lambda s, q, k, v: v.mT @ (q @ k.mT).softmax(-1),
    "one head, of two dimensions": lambda s, q, k, v: ((q[0, 0] @ k[0, 0].mT).softmax(-1) @ v[0, 0])[None],
    "one head of keys": lambda s, q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1],
    "written half-way": written,
    "scores are seen in place": read_before_it_is_written,
    "a mask is written": mask_that_is_written,
    "scores are added to a mask": lambda s, q, k, v: s.kept[:].add_(q @ k.mT).softmax(-1) @ v,
    "an fp32 region": held_by_the_user,
}


@layers(
    lambda function: dict(
        function=function,
        qkv=nn.Linear(WIDTH, 3 * WIDTH),
        bias=nn.Parameter(torch.zeros(LENGTH, LENGTH)),
        kept=nn.Buffer(torch.zeros(2, HEADS, LENGTH, LENGTH)),
    )
)
def Model(self, x):
    q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
    return self.function(self, q, k, v)


def stepped(function, policy="bf16", wide=False):
    """The result, the gradients, and the calls of attention of a converted model; or of eager fp64."""
    torch.manual_seed(0)
    model, x = Model(function), 3 * torch.randn(2, LENGTH, WIDTH)
    model, x = (model.double(), x.double()) if wide else (amp_graph.convert(model, policy), x)
    torch.manual_seed(1)
    out = model(x)
    (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)).sum().backward()
    if wide:
        return [out.detach(), model.qkv.weight.grad], 0
    return [out.detach(), model.qkv.weight.grad], calls_of(model)


def calls_of(model):
    nodes = [n for graph in conversion_of(model).graphs for n in graph.rewritten.gm.graph.nodes]
    return sum(n.target is attention_low for n in nodes)


def becomes_the_call_and_is_as_exact(function):
    fused, calls = stepped(function)
    drawn = torch.rand(1)
    written_out, none = stepped(function, "bf16,skip=fuse_attention")
    assert (calls, none) == (1, 0)
    assert torch.equal(drawn, torch.rand(1)), "both leave the generator where it was"
    exact, _ = stepped(function, wide=True)
    for ours, theirs in zip(errors(fused, exact), errors(written_out, exact), strict=True):
        assert ours <= 1.1 * theirs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMS)
def test_formulas_become_the_call_and_are_as_exact(name):
    becomes_the_call_and_is_as_exact(FORMS[name])


def test_heads_that_were_folded_for_the_products_are_no_longer_copied():
    """The reshapes copy, because the heads lie behind each other only within a position."""
    model = amp_graph.convert(Model(bart), "bf16")
    model(torch.randn(2, LENGTH, WIDTH))
    (graph,) = conversion_of(model).graphs
    assert "attention_low(" in graph_text(graph.rewritten.gm)
    assert "reshape(" not in graph_text(graph.rewritten.gm)


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_drops_what_torch_drops(name):
    becomes_the_call_and_is_as_exact(DROPPED[name])


def test_control_other_draws_are_seen(monkeypatch):
    plain_bits = dropout_bits.dropout_bits
    monkeypatch.setattr(dropout_bits, "dropout_bits", lambda x, p, keys=1: (torch.rand(1), plain_bits(x, p, keys))[1])
    with pytest.raises(AssertionError):
        becomes_the_call_and_is_as_exact(dropped)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_attention_stays(name):
    torch.manual_seed(1)
    ours, calls = stepped(OTHERS[name])
    without, _ = stepped(OTHERS[name], "bf16,skip=fuse_attention")
    assert calls == 0
    assert all(map(torch.equal, ours, without))


@pytest.mark.parametrize(
    "policy",
    [
        "bf16,deny=aten.matmul", "bf16,deny=aten.scaled_dot_product_attention", "fp16", "bf16,lists=autocast_cpu",
        "bf16,skip=attention",
    ],
)  # fmt: skip
def test_who_asks_for_a_precision_gets_it_and_without_the_kernel_the_formula_stays(policy):
    assert stepped(plain, policy)[1] == 0


@forward_of(nn.Module)
def Scoring(self, q, k):
    return q @ k.mT


@layers(lambda: dict(qkv=nn.Linear(WIDTH, 3 * WIDTH), scoring=Scoring()))
def InParts(self, x):
    q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
    return self.scoring(q, k).softmax(-1) @ v


@pytest.mark.parametrize(("policy", "count"), [("bf16", 1), ("bf16,keep_fp32=scoring", 0), ("bf16,keep_fp32=qkv", 1)])
def test_a_module_of_the_formula_that_is_kept_in_fp32_is(policy, count):
    model = amp_graph.convert(InParts(), policy)
    model(torch.randn(2, LENGTH, WIDTH))
    assert calls_of(model) == count


def test_lengths_that_change_are_captured_once_more_and_no_oftener():
    model = amp_graph.convert(InParts())
    for length in (12, 20, 28, 36, 40):
        x = torch.randn(2, length, WIDTH)
        wanted = InParts.forward(model, x)
        assert (model(x) - wanted).norm() <= 0.02 * wanted.norm()
    graphs = conversion_of(model).graphs
    assert len(graphs) == 2, "of one length, and of any"
    assert all(any(n.target is attention_low for n in g.rewritten.gm.graph.nodes) for g in graphs)


def added(s, q, k, v):
    """As Hugging Face's eager form, where the text is padded on the left: the least number is added."""
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~SEEN | PADDED, torch.finfo(torch.float32).min)
    return (q @ k.mT * 0.4 + mask).softmax(-1) @ v


def added_in_part(s, q, k, v):
    """As layers read what there is of keys from a mask that all share."""
    mask = torch.zeros(2, 1, LENGTH, LENGTH + 4).masked_fill(
        F.pad(~SEEN | PADDED, (0, 4)), torch.finfo(torch.float32).min
    )
    return (q @ k.mT * 0.4 + mask[:, :, :, : k.shape[-2]]).softmax(-1) @ v


@pytest.mark.parametrize("function", [added, added_in_part])
def test_rows_with_the_least_number_added_are_as_exact_as_written_out(function, monkeypatch):
    exact = stepped(function, wide=True)[0]
    written_out = errors(stepped(function, "bf16,skip=fuse_attention")[0], exact)
    fused, calls = stepped(function)
    assert calls == 1
    assert all(ours <= 1.1 * theirs for ours, theirs in zip(errors(fused, exact), written_out, strict=True))
    kernels = attention_kernel._mask_of
    monkeypatch.setattr(attention_kernel, "_mask_of", lambda mask: kernels(mask.bfloat16()))
    assert max(errors(stepped(function)[0], exact)) > 10 * max(written_out), "control: -inf in bf16"


def test_with_the_least_number_added_in_fp32_the_formula_is_written_out_again(monkeypatch):
    exact = stepped(added, wide=True)[0]
    found, calls = stepped(added, "bf16,keep_fp32=.*")
    assert calls == 0
    assert max(errors(found, exact)) < 1e-5
    monkeypatch.setattr(
        "amp_graph.passes.backends.cpu.attention.lower_attention._is_worse_fused", lambda node, mask: False
    )
    assert max(errors(stepped(added, "bf16,keep_fp32=.*")[0], exact)) > 0.01, "control: torch's own backward"


def test_rows_that_see_nothing_are_zeros():
    hidden = torch.zeros(LENGTH, LENGTH).bool()
    hidden[3] = True
    (out, grad), calls = stepped(lambda s, q, k, v: (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v)
    assert calls == 1
    assert not out[:, :, 3].any()
    assert grad.isfinite().all()


@pytest.mark.parametrize(("name", "layers"), [("bert_eager", 2), ("mixtral_eager", 1)])
def test_models_of_the_library(name, layers):
    pytest.importorskip("transformers")
    model, args, kwargs = make(name)
    amp_graph.convert(model)(*args, **kwargs)
    assert calls_of(model) >= layers


WRITTEN = {
    "matmul": lambda q, k, v: (q @ k.mT * 0.125).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * 0.125).softmax(-1), v
    ),
}


@pytest.mark.parametrize(("name", "word"), [("matmul", "fuse_attention"), ("einsum", "einsum_to_matmul")])
def test_what_stays_written_out_has_1_9_times_the_error(name, word):
    q, k, v = torch.randn(3, 2, 4, 128, 64).bfloat16().float()
    exact = WRITTEN["matmul"](q.double(), k.double(), v.double())
    found = [
        amp_graph.convert(Function(lambda s, *given: WRITTEN[name](*given)), policy)(q, k, v).detach()
        for policy in ("bf16", f"bf16,skip={word}")
    ]
    ours, theirs = (errors([one], [exact])[0] for one in found)
    assert theirs > 1.8 * ours
