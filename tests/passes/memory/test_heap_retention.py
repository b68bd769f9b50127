"""The heap that one step leaves is the next one's: no page faults, given back with the step, and never at a risk."""

import gc
import platform
import resource
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.memory.heap_retention import HEAP, PIECE, SELDOM, SOME, Allocator, KeptHeap
from amp_graph.passes.memory.peak_memory import bytes_made, most_bytes
from amp_graph.passes.torch_compat.fake import make_fx

# Page faults of most steps once the heap has settled, and what is resident before and after the step is dropped: in a
# process of its own, whose allocator nothing else has touched.
STEPS = """
import gc, resource, sys, torch
import amp_graph
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
torch.set_num_threads(1)
class Wide(torch.nn.ModuleList):
    def forward(self, x):
        found = [layer(x) for layer in self]  # all there at the same time
        return sum(found[1:], found[0])
layers = [m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
model = (Wide if sys.argv[2] == "inference" else lambda all: torch.nn.Sequential(*all))(layers)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
policy, kind, *others = sys.argv[1:]
x = torch.randn(1 << 13, 256)
if kind == "TrainStep":
    step = amp_graph.TrainStep(model, lambda out: out.square().mean(), optimizer, policy)
else:
    amp_graph.convert(model, policy)
    def step(x):
        if kind == "inference":
            with torch.inference_mode():
                return model(x)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
if others:  # comes to stay where the steps' memory was
    import ctypes
    from amp_graph.passes.memory import heap_retention as kept_heap
    step(x), step(x)
    lasting = [kept_heap.glibc().malloc(100_000) for _ in range(int(others[0]))]
    [ctypes.memset(block, 1, 100_000) for block in lasting]
faults = []
for _ in range(30 if not others else 100):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
held = resident()
del step, model, optimizer, layers
torch._dynamo.reset()
gc.collect()
print(sorted(faults[-10:])[5], held - resident())
"""
# Page faults of 60 MB in blocks that glibc puts one behind the other at the end of the heap, made and freed before.
BLOCKS = """
import ctypes, resource, sys
from amp_graph.passes.memory.heap_retention import HEAP, glibc
class Owner: pass
owner, calls, blocks = Owner(), glibc(), [0] * 600
if sys.argv[1] == "True":
    assert HEAP.keep(owner, 60_000_000) == 60_000_000
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(600):
        blocks[i] = calls.malloc(100_000)
        ctypes.memset(blocks[i], 1, 100_000)
    for block in blocks:
        calls.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
KEEP = "bf16,keep_memory=true"
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory themselves")


def printed(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return tuple(map(int, done.stdout.split()))


def has_faults(code, *arguments):
    """Say whether steps have page faults, in one of three processes: in one of some fifty, something small comes to
    stay behind the steps' memory, and keeps the heap for them."""
    return any(printed(code, *arguments)[0] > 1000 for _ in range(3))


def faults_of_blocks(kept):
    return printed(BLOCKS, kept)[0]


@pytest.mark.slow
@needs_glibc
@pytest.mark.parametrize("kind", ["TrainStep", "convert", "inference"])
def test_the_next_step_takes_the_memory_that_the_last_one_freed(kind):
    faults, given_back = printed(STEPS, KEEP, kind)
    assert faults < 50
    assert given_back > 16 << 20  # with the step: six activations of 4 MiB, and more; of a call 12, and more


@pytest.mark.slow
@needs_glibc
@pytest.mark.parametrize("kind", ["TrainStep", "convert", "inference"])
def test_what_others_have_taken_is_kept_anew(kind):
    assert printed(STEPS, KEEP, kind, 2000)[0] < 50


@pytest.mark.slow
@needs_glibc
def test_control_what_others_have_taken_is_missed_where_nobody_looks():
    unwatched = "import amp_graph.passes.memory.heap_retention as k; k.KeptHeap.watch = lambda *given: lambda: None\n"
    assert has_faults(unwatched + STEPS, KEEP, "inference", 2000)


@pytest.mark.slow
@needs_glibc
def test_control_calls_without_gradients_have_page_faults_where_nothing_is_kept():
    assert has_faults(STEPS, "bf16", "inference")


@needs_glibc
def test_what_was_freed_at_the_end_of_the_heap_needs_no_new_pages():
    assert faults_of_blocks(kept=False) > 10_000
    assert faults_of_blocks(kept=True) < 50


class Memory:
    """An allocator whose blocks are numbers, one after the other; ``most`` blocks at the same time."""

    def __init__(self, most=10**6):
        self.blocks, self.most, self.longest, self.trims = set(), most, 0, 0

    def malloc(self, size):
        assert size == PIECE
        if len(self.blocks) == self.most:
            return None
        new = next(i for i in range(1, self.most + 1) if i not in self.blocks)  # in the first gap, as glibc
        self.blocks.add(new)
        self.longest = max(self.longest, new)
        return new

    def free(self, block):
        self.blocks.discard(block or None)

    def trim(self, keep):
        self.trims += 1
        return 1

    def allocator(self):
        return Allocator(self.malloc, self.free, self.trim)


class Mapping(Memory):
    """An allocator that maps what is large far away, until a block as large was freed; ``told``: for good."""

    def __init__(self, told):
        super().__init__()
        self.told, self.threshold, self.sizes, self.end = told, PIECE, {}, 1 << 40

    def malloc(self, size):
        at = self.end + (1 << 45 if size > self.threshold else 0)
        self.end += size
        self.sizes[at] = size
        return at

    def free(self, block):
        size = self.sizes.pop(block or None, 0)
        if not self.told:
            self.threshold = max(self.threshold, size)


class Owner:
    pass


@pytest.mark.parametrize("told", [False, True])
def test_large_needs_are_met_by_large_pieces_where_these_come_from_the_heap(told):
    memory, owner, need = Mapping(told), Owner(), 10_000 * PIECE
    made, malloc = [], memory.malloc
    memory.malloc = lambda size: made.append(size) or malloc(size)
    heap = KeptHeap(memory.allocator)
    assert heap.keep(owner, need) == need
    (block,) = memory.sizes
    assert block < 1 << 45  # of the heap
    assert block - (1 << 40) >= need
    assert (made[-1] == PIECE) is told
    del owner
    assert not memory.sizes


def test_one_block_stands_beyond_the_largest_need_of_all_that_live():
    memory = Memory()
    heap, small, large = KeptHeap(memory.allocator), Owner(), Owner()
    assert heap.keep(small, 10 * PIECE) == 10 * PIECE
    assert memory.blocks == {11}
    assert heap.keep(large, 20 * PIECE) == 20 * PIECE
    assert len(memory.blocks) == 1
    assert min(memory.blocks) > 20
    assert heap.keep(Owner(), 5 * PIECE) == 5 * PIECE  # is part of what is kept anyway, and is gone at once
    assert min(memory.blocks) > 20
    del large
    assert memory.blocks == {11}  # what the other one needs
    trims = memory.trims
    del small
    assert not memory.blocks
    assert memory.trims == trims + 1
    again = Owner()
    assert heap.keep(again, PIECE) == PIECE
    assert len(memory.blocks) == 1
    del again
    assert not memory.blocks


def test_what_has_come_to_stay_in_the_heap_leaves_a_new_owner_as_much_as_it_needs():
    memory = Memory()
    heap, first, second = KeptHeap(memory.allocator), Owner(), Owner()
    heap.keep(first, 10 * PIECE)
    moments = {memory.malloc(PIECE) for _ in range(6)}
    assert max(moments) < 11
    assert heap.keep(second, 5 * PIECE) == 5 * PIECE
    (block,) = memory.blocks - moments
    assert block - 1 - len(moments) >= 10  # free before it, as any of the two may need


def test_what_the_system_refuses_is_given_back_and_the_heap_stays_as_it_was():
    memory = Memory()
    heap, owner, large = KeptHeap(memory.allocator), Owner(), Owner()
    heap.keep(owner, 10 * PIECE)
    kept = set(memory.blocks)
    memory.most = 15
    assert heap.keep(large, 20 * PIECE) == 0
    assert memory.blocks == kept
    assert heap.keep(Owner(), 5 * PIECE) == 5 * PIECE, "there it is, as long as nothing else has taken it"
    assert memory.blocks == kept
    del large, owner
    assert not memory.blocks


def test_small_steps_other_c_libraries_and_other_threads_are_left_alone():
    memory, owner = Memory(), Owner()
    assert KeptHeap(memory.allocator).keep(owner, PIECE - 1) == 0
    assert KeptHeap(lambda: None).keep(owner, 10 * PIECE) == 0
    found = []
    thread = threading.Thread(target=lambda: found.append(KeptHeap(memory.allocator).keep(Owner(), 10 * PIECE)))
    thread.start()
    thread.join()
    assert found == [0]  # whose heaps are others, and small
    del owner
    assert memory.longest == memory.trims == 0


def test_what_is_needed_at_the_same_time_is_added_up_once_each():
    def work(x):  # of 400 bytes each
        a = x + 1
        b = a.view(10, 10)  # the memory of a
        c = b * 2
        d = c.sin()  # a is needed to the end, c no longer than here
        e = d + 1
        values, places = e.view(-1).sort()  # 400 and 800 bytes, beside a and e
        return values + a + places

    gm = make_fx(work, tracing_mode="fake")(torch.zeros(100))
    assert most_bytes(gm) == 5 * 400
    assert most_bytes(gm, but=lambda node: "sort" in node.name) == 3 * 400


def step_of(width, policy="bf16"):
    model = nn.Linear(width, width)
    return amp_graph.TrainStep(model, lambda out: out.sum(), torch.optim.SGD(model.parameters(), 0.01), policy)


@needs_glibc
def test_a_step_says_what_it_keeps_and_keeps_nothing_where_it_is_told_not_to():
    x = torch.randn(64, 512)
    kept, plain = step_of(512, KEEP), step_of(512)
    kept(x), plain(x)
    assert "MiB are kept in the process for the next step (keep_memory=)" in amp_graph.report(kept).text()
    assert "kept in the process" not in amp_graph.report(plain).text()
    assert "memory: at most 1" in amp_graph.report(plain).text()  # MiB: a gradient of 512 x 512 in fp32, and less
    owners = len(HEAP._needs)
    del kept
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert len(HEAP._needs) < owners


KEPT_FOR = "are kept in the process for"


@needs_glibc
def test_a_converted_model_says_of_which_graphs_memory_is_kept():
    model, plain = (amp_graph.convert(nn.Linear(512, 512), p) for p in (KEEP, "bf16"))
    x = torch.randn(64, 512)
    with torch.no_grad():
        model(x[:1]), model(x)  # the second graph is of any number of rows; one row is not worth it
    model(x), plain(x)
    call, step = (line for line in amp_graph.report(model).text().splitlines() if KEPT_FOR in line)
    assert "of what graph 1 frees are kept in the process for the next call" in call
    assert "of what graph 2 and its backward free are kept in the process for the next step" in step
    assert KEPT_FOR not in amp_graph.report(plain).text()


def test_what_a_captured_graph_makes_is_counted_by_storages():
    def work(x):  # of 400 bytes each
        a = x.view(10, 10) + 1
        return a.t() * a, x.t()

    gm = make_fx(work, tracing_mode="fake")(torch.zeros(100))
    assert bytes_made(gm) == 2 * 400


def test_faults_are_looked_at_seldom_and_ever_less_where_keeping_does_not_help(monkeypatch):
    faults, kept, owner = [0], [], Owner()
    usage = type("Usage", (), {"ru_minflt": property(lambda self: faults[0])})()
    monkeypatch.setattr(resource, "getrusage", lambda whose: usage)
    heap = KeptHeap(lambda: None)
    monkeypatch.setattr(heap, "keep_for_steps", lambda one, need: kept.append((one, need)))

    def kept_after(steps, faults_of_a_step, every=1):
        kept.clear()
        for step in range(steps):
            watch()
            faults[0] += every * faults_of_a_step if step % every == every - 1 else 0
        return len(kept)

    size = 1000 * SOME * resource.getpagesize()
    heap._needs[id(owner)] = size
    watch = heap.watch(owner, size)
    assert kept_after(1000, 1000) == 0, "so few are no sign"
    assert 1 <= kept_after(2 * SELDOM, 1001) <= 4
    assert kept[0] == (owner, size)
    assert kept_after(1000, 0) == 0, "it helped"
    assert 1 <= kept_after(2000, 2000) <= 10, "it does not help"
    kept_after(3000, 0)
    assert 1 <= kept_after(2 * SELDOM, 1001) <= 4, "others have taken it again"
    kept_after(3000, 0)
    assert 1 <= kept_after(2 * SELDOM, 1100, every=5) <= 4, "it shows in some of the steps"
    kept_after(3000, 0)
    heap._needs[0] = size + 1
    assert kept_after(1000, 2000) == 0, "another one needs more, and looks"
    del heap._needs[0]
    kept.clear()
    del owner
    gc.collect()
    assert kept_after(1000, 2000) == 0


@needs_glibc
def test_keep_heap_is_for_policies_that_leave_it_open_and_for_later_captures(monkeypatch):
    monkeypatch.setattr(HEAP, "by_default", False)
    x = torch.randn(64, 512)
    before, told_not_to, told_to = step_of(512), step_of(512, "bf16,keep_memory=false"), step_of(512, "bf16-O1")
    before(x)
    assert amp_graph.memory.keep_heap()
    for step in (before, told_not_to, told_to):
        step(x)
    kept = ["kept in the process" in amp_graph.report(step).text() for step in (before, told_not_to, told_to)]
    assert kept == [False, False, True]
    assert amp_graph.memory.keep_heap(on=False)
    after = step_of(512)
    after(x)
    assert "kept in the process" not in amp_graph.report(after).text()
