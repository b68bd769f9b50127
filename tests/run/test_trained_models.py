"""Which models ``amp-graph run`` converts, in this process: those that are called outermost and that are trained."""

import gc
import pickle
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_graph.capture.conversion import Conversion, conversion_of
from amp_graph.run import eligibility
from amp_graph.run.call_site import site_of_call
from amp_graph.run.exit_report import exit_report, write_reports
from amp_graph.run.options import RunOptions
from amp_graph.run.trained_models import State
from tests.layers import forward_of, layers


@layers(lambda: dict(encoder=nn.Sequential(nn.Linear(8, 16), nn.ReLU()), head=nn.Linear(16, 4)))
def Net(self, x):
    """A model with two parts."""
    return self.head(self.encoder(x))


def step(*outputs):
    sum(out.square().mean() for out in outputs).backward()


def train(call, x, times=3):
    """Run ``times`` steps; ``call`` is a model, or returns its outputs."""
    for _ in range(times):
        step(call(x))


def state_of(models, module):
    (found,) = [m for m in models.seen if m.ref() is module]
    return found.state, found.why_not_converted() if found.state is not State.CONVERTED else ""


def lines(models):
    return exit_report(models, Counter()).removeprefix("amp-graph run: ")


def test_a_model_is_converted_at_its_next_call_after_a_backward(watch):
    models, model, x = watch(), Net(), torch.randn(4, 8)
    expected = model(x)
    assert conversion_of(model) is None
    step(expected)
    assert conversion_of(model) is None
    found = model(x)
    assert conversion_of(model) is not None
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    assert torch.allclose(found, expected, atol=0.05)
    assert not any(p._backward_hooks for p in model.parameters())
    assert "converted 1 model, policy bf16-O1" in lines(models)
    assert "test_trained_models.py:" in lines(models)


def test_gradients_of_autograd_grad_are_a_proof(watch):
    models, model, x = watch(), Net(), torch.randn(4, 8)
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model(x)
    assert state_of(models, model)[0] is State.CONVERTED


def test_both_models_of_a_gan_are_converted_and_its_loss_is_no_model(watch):
    models, generator, critic, loss = watch(), Net(), nn.Sequential(nn.Linear(4, 1)), nn.BCEWithLogitsLoss()
    for _ in range(2):
        fake = generator(torch.randn(4, 8))
        for part in (torch.randn(4, 4), fake.detach(), fake):
            out = critic(part)
            loss(out, torch.ones_like(out)).backward()
    assert state_of(models, generator)[0] is state_of(models, critic)[0] is State.CONVERTED
    assert len(models.seen) == 2


def test_what_is_not_trained_is_left_and_said_so(watch):
    models, frozen, unused, model = watch(), Net().requires_grad_(False), Net(), nn.Linear(4, 4)
    x, target = torch.randn(4, 8), Net()
    for _ in range(3):
        unused(x).detach()
        with torch.no_grad():
            target(x)
        step(model(frozen(x)))
    assert state_of(models, model)[0] is State.CONVERTED
    assert state_of(models, frozen) == (State.WATCHED, eligibility.FROZEN)
    assert state_of(models, unused) == (State.WATCHED, eligibility.NEVER_TRAINED)
    assert state_of(models, target) == (State.WATCHED, eligibility.NO_GRADIENTS)
    assert lines(models).count("not converted: Net") == 3


def test_a_frozen_model_is_converted_once_it_is_trained(watch):
    models, model, x = watch(), Net().requires_grad_(False), torch.randn(4, 8)
    model(x)
    model.requires_grad_(True)
    step(model(x))
    model(x)
    assert state_of(models, model)[0] is State.CONVERTED


def test_parts_that_are_called_alone_are_models(watch):
    models, model, x = watch(), Net(), torch.randn(4, 8)
    train(lambda x: model.head(model.encoder(x)), x)
    assert conversion_of(model.head) is not None
    assert conversion_of(model.encoder) is not None
    train(model, x)
    assert conversion_of(model) is not None, "the outermost module is converted"
    assert conversion_of(model.head) is None
    step(model.encoder(x))
    assert conversion_of(model.encoder) is None
    assert lines(models).startswith("converted 1 model")


def test_a_report_whose_folder_is_gone_is_one_line(watch, tmp_path):
    models, model = watch(report=str(tmp_path / "report.html")), Net()
    train(model, torch.randn(4, 8), 2)
    (told,) = write_reports(models, tmp_path / "gone" / "report.html")
    assert told == f"--report {tmp_path / 'gone' / 'report.html'}: not written: No such file or directory"


def test_parts_of_a_converted_model_are_not_reported(watch):
    models, model, x = watch(), Net(), torch.randn(4, 8)
    with torch.no_grad():
        model.encoder(x)
    train(model, x)
    with torch.no_grad():
        model.head(torch.randn(4, 16))
    assert lines(models).count("\n") == 1
    assert "not converted" not in lines(models)


def test_autocast_of_the_script_is_left_alone_or_replaced(watch):
    class Inner(Net):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    for replaces, expected in ((False, State.LEFT), (True, State.CONVERTED)):
        models, model, inner, x = watch(replace_autocast=replaces), Net(), Inner(), torch.randn(4, 8)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            step(out.float(), inner(x).float())
        assert state_of(models, model)[0] is expected
        assert state_of(models, inner) == (State.LEFT, eligibility.INNER_AUTOCAST)
        models.stop()


def test_fp16_autocast_of_the_script_is_replaced_and_its_scale_is_its_own(watch):
    models, model, other, x = watch(replace_autocast=True), Net(), Net(), torch.randn(4, 8)
    models.options = RunOptions.checked("fp16", replace_autocast=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        step(out.float(), other(x))
    assert state_of(models, model)[0] is State.CONVERTED
    assert not next(m for m in models.seen if m.ref() is model).is_scaled
    assert state_of(models, other) == (State.WATCHED, eligibility.NO_STEP)


def test_recomputed_and_compiled_models_are_left(watch):
    models, model, again, x = watch(), Net(), Net(), torch.randn(4, 8)
    compiled = torch.compile(again, backend="eager")
    for _ in range(3):
        step(checkpoint(model, x, use_reentrant=False), compiled(x))
    assert state_of(models, model) == (State.LEFT, eligibility.CHECKPOINTED)
    assert "compiled by the script" in state_of(models, compiled)[1]


def test_a_checkpoint_inside_of_a_model_is_part_of_it(watch):
    @forward_of(Net)
    def Checkpointed(self, x):
        return self.head(checkpoint(self.encoder, x, use_reentrant=False))

    models, model, x = watch(), Checkpointed(), torch.randn(4, 8)
    train(model, x)
    assert [m.kind for m in models.seen] == ["Checkpointed"]
    assert conversion_of(model) is not None


def test_a_model_that_fsdp_shards_is_left(watch):
    class FullyShardedDataParallel(Net):
        """The name of torch's first such class; test_scripts has models of ``fully_shard``."""

    models, model = watch(), FullyShardedDataParallel()
    step(model(torch.randn(4, 8)))
    assert "wrapped by FullyShardedDataParallel" in state_of(models, model)[1]


def test_what_convert_refuses_is_left_with_its_reason(watch):
    models, model, x = watch(), Net().bfloat16(), torch.randn(4, 8, dtype=torch.bfloat16)
    train(model, x)
    assert "level O1 trains parameters in fp32" in state_of(models, model)[1]
    assert lines(models).startswith("nothing was converted")


def test_an_error_of_ours_does_not_stop_the_script(watch, monkeypatch):
    models, model, told = watch(), Net(), []
    models.note = told.append
    monkeypatch.setattr(models, "_convert", lambda model: 1 / 0)
    train(model, torch.randn(4, 8), 4)
    assert conversion_of(model) is None
    assert [line.partition(":")[0] for line in told] == ["nothing more is converted, as amp-graph run itself failed"]


def test_a_model_that_is_wrapped_after_it_was_converted_stays_converted(watch):
    models, model, x = watch(), Net(), torch.randn(4, 8)
    wrapped = nn.DataParallel(model)
    for called in (model, wrapped):
        for _ in range(3):
            step(called(x))
        assert conversion_of(model) is not None
    assert "Net in DataParallel (212 parameters)" in lines(models)


def test_calls_in_transforms_and_traces_are_as_written(watch):
    models, model, x = watch(), Net(), torch.randn(4, 8)
    parameters = dict(model.named_parameters())
    for _ in range(3):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
    assert conversion_of(model) is None
    assert state_of(models, model)[0] is State.WATCHED


def test_a_copy_is_a_model_of_its_own(watch):
    import copy

    models, model, x = watch(), Net(), torch.randn(4, 8)
    train(model, x, 2)
    copied = copy.deepcopy(model)
    assert conversion_of(model) is not None
    assert conversion_of(copied) is None, "a copy is as written, until it is trained"
    train(copied, x, 2)
    assert conversion_of(copied) is not None
    assert len(models.seen) == 2


def test_a_model_that_the_script_dropped_is_reported_and_not_kept(watch):
    """Nor is what is known of it: another model may get its address."""
    models, model = watch(), Net()
    train(model, torch.randn(4, 8), 3)
    ref = weakref.ref(model)
    assert models._by_id
    del model
    gc.collect()
    assert ref() is None
    assert not models._by_id
    assert "Net (212 parameters)" in lines(models)
    assert "1 graph" in lines(models)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_converted_model_is_saved_and_exported_as_written(watch):
    models, model, x = watch(), nn.Sequential(Net(), nn.Linear(4, 4)), torch.randn(4, 8)
    plain = pickle.dumps(model)
    train(model, x, 2)
    assert state_of(models, model)[0] is State.CONVERTED
    found = pickle.dumps(model)
    assert b"amp_graph" not in found.replace(Net.__module__.encode(), b"")
    assert pickle.loads(found).__dict__.keys() == pickle.loads(plain).__dict__.keys()
    with torch.no_grad():
        expected = pickle.loads(found)(x)
        assert torch.equal(torch.jit.trace(model, x)(x), expected)
        assert torch.equal(torch.jit.script(model)(x), expected)
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    assert conversion_of(model) is not None


def test_a_class_with_a_getstate_of_its_own_is_saved_as_written(watch):
    class_ = Stateful
    models, model, x = watch(), class_(), torch.randn(4, 8)
    train(model, x, 2)
    assert state_of(models, model)[0] is State.CONVERTED
    found = pickle.dumps(model)
    assert b"amp_graph.capture" not in found
    again = pickle.loads(found)
    assert not isinstance(again.__dict__["forward"], Conversion)
    assert again.forward(x).shape == (4, 4)


class Stateful(Net):
    """A model that pickles all of its attributes itself."""

    def __getstate__(self):
        return self.__dict__.copy()


def test_the_line_of_a_call_is_the_users_or_else_a_librarys():
    def site(code, file):
        """What a thread finds that runs ``code`` as ``file``: its other frames are those of Python's library."""
        given = {"__name__": "trainer.loop", "found": [], "site_of_call": site_of_call}
        thread = threading.Thread(target=exec, args=(compile(code, file, "exec"), given))
        thread.start()
        thread.join()
        return given["found"]

    library, user = "/env/lib/site-packages/trainer/loop.py", "/work/train.py"
    call = "found.append(site_of_call())"
    assert site(f"\n{call}", library) == [f"{library}:2"]
    assert site(f"\n\n{call}", user) == [f"{user}:3"]
    assert site(f"exec(compile({call!r}, {library!r}, 'exec'))", user) == [f"{user}:1"]
