"""Updates of parameters in one pass between guard pages, and rows of embeddings' gradients."""

import torch

from tests.guard.case import BF16, FP16, FP32, drawn, equal, op, over, same

LOWS = {"bf16": BF16, "fp16": FP16}
RULES = (
    "adam", "adam decoupled", "adam decay amsgrad", "sgd", "sgd decay", "sgd momentum", "sgd decay momentum nesterov",
    "adagrad", "adagrad decay",
)  # fmt: skip
SIZES = ((0,), (1,), (3,), (17,), (0, 31, 1), (33, 0, 1025), (4097, 2))


def _options(rule):
    words = rule.split()
    return {
        "weight_decay": 0.1 if {"decay", "decoupled"} & {*words} else 0.0,
        "eps": 0.0 if words[0] == "sgd" else 1e-8,
        "beta1": 0.9 if words[0] == "adam" else 0.0,
        "beta2": 0.99 if words[0] == "adam" else 0.0,
        "momentum": 0.9 if "momentum" in words else 0.0,
        "lr_decay": 0.01 if words[0] == "adagrad" else 0.0,
    }


def _optimizer(rule, params, states):
    """torch's own, with the state of one step before."""
    words, given = rule.split(), _options(rule)
    if words[0] == "sgd":
        made = torch.optim.SGD(
            params,
            0.1,
            given["momentum"],
            weight_decay=given["weight_decay"],
            nesterov="nesterov" in words,
            foreach=False,
        )
        names = ["momentum_buffer"]
    elif words[0] == "adagrad":
        made = torch.optim.Adagrad(params, 0.1, 0.01, given["weight_decay"], foreach=False)
        names = ["sum"]
    else:
        kind = torch.optim.AdamW if "decoupled" in words else torch.optim.Adam
        made = kind(
            params, 0.1, (0.9, 0.99), weight_decay=given["weight_decay"], amsgrad="amsgrad" in words, foreach=False
        )
        names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    for name, kind in zip(names, states, strict=False):
        for p, state in zip(params, kind, strict=True):
            made.state[p][name] = state.clone()
    for p in params:
        if words[0] != "sgd":
            made.state[p]["step"] = torch.tensor(1.0)
    return made


def _kinds(rule):
    words = rule.split()
    return {"adam": 2 + ("amsgrad" in words), "sgd": int("momentum" in words), "adagrad": 1}[words[0]]


@over(sizes=SIZES, rule=RULES, low=tuple(LOWS), wide=(True, False), copies=(True, False))
def update(sizes, rule, low, wide, copies):
    params = [drawn(n, dtype=FP32) for n in sizes]
    grads = [drawn(n, dtype=FP32 if wide else LOWS[low], scale=0.3) for n in sizes]
    states = [[drawn(n, dtype=FP32).square_() for n in sizes] for _ in range(_kinds(rule))]
    plain = [torch.nn.Parameter(p.clone()) for p in params]
    theirs = _optimizer(rule, plain, states)
    for p, g in zip(plain, grads, strict=True):
        p.grad = g.float()
    theirs.step()
    counted = not rule.startswith("sgd")
    steps = [torch.ones(()) for _ in sizes] if counted else []
    lows = [torch.empty(n, dtype=LOWS[low]) for n in sizes] if copies else []
    flat = [t for kind in states for t in kind]
    lr, numbers = torch.tensor(0.1, dtype=torch.float64), list(range(len(lows)))
    given = (params, grads, flat, steps, lows, numbers, lr, None, None, None)
    op("one_pass_update_")(*given, rule=f"{rule} {low}", **_options(rule))
    for found, wanted in zip(params, plain, strict=True):
        same(found, wanted.detach(), 2.0**-20)
    for copy, p in zip(lows, params, strict=False):
        equal(copy, p.to(copy.dtype))
    assert all(step == 2 for step in steps), "counted"


@over(sizes=SIZES, low=tuple(LOWS), wide=(True, False))
def looks_and_sums(sizes, low, wide):
    grads = [drawn(n, dtype=FP32 if wide else LOWS[low]) for n in sizes]
    found_inf, norm = op("look_at_gradients")(grads, f"sgd {low}")
    same(norm, sum(g.double().square().sum() for g in grads).sqrt(), 2.0**-18)
    assert found_inf == 0, "all are finite"
    sums = [drawn(n, dtype=FP32, scale=2) for n in sizes]
    wanted = [s + g.float() for s, g in zip(sums, grads, strict=True)]
    op("add_gradients_")(sums, grads, f"sgd {low}")
    for one, other in zip(sums, wanted, strict=True):
        equal(one, other)


@over(table=(1, 3, 17, 40), width=(1, 3, 17, 700, 1025), count=(0, 1, 5, 33), bags=(True, False), padding=(-1, 0))
def rows_of_tables(table, width, count, bags, padding):
    """Rows that were read, and their update, with nothing else and beside a dense gradient."""
    ids = torch.arange(count) * 7 % table
    offsets = torch.tensor([0, 0, count // 2, count]) if bags else None
    grad = drawn(4 if bags else count, width, dtype=FP32)
    slots, rows = op("gradient_rows")([grad], [ids], [offsets], [padding], table, "sgd bf16")
    dense = torch.zeros(table, width)
    bag = torch.bucketize(torch.arange(count), offsets, right=True) - 1 if bags else torch.arange(count)
    counted = ids != padding
    dense.index_add_(0, ids[counted], grad[bag[counted]])
    made = torch.zeros(table, width)
    there = slots >= 0
    made[there] = rows[slots[there].long()]
    same(made, dense, 2.0**-20)
    for alone in (True, False):
        beside = torch.empty(0) if alone else drawn(table, width, dtype=FP32)
        param, low = drawn(table, width, dtype=FP32), torch.empty(table, width, dtype=BF16)
        whole = dense if alone else dense + beside
        wanted = param - 0.1 * whole
        added = {"rows": [slots, rows], "with_rows": [0], "alone": [0] if alone else []}
        lr = torch.tensor(0.1, dtype=torch.float64)
        op("one_pass_update_")([param], [beside], [], [], [low], [0], lr, None, None, None, rule="sgd bf16", **added)
        same(param, wanted, 2.0**-20)
        equal(low, param.bfloat16())
        found_inf, norm = op("look_at_gradients")([beside], "sgd bf16", **added)
        same(norm, whole.double().norm(), 2.0**-16)
        sums = [drawn(table, width, dtype=FP32)]
        wanted = sums[0] + whole
        op("add_gradients_")(sums, [beside], "sgd bf16", **added)
        same(sums[0], wanted, 2.0**-20)
        assert found_inf == 0, "all are finite"
