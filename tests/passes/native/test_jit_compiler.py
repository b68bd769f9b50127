"""Compiled code is loaded where it is whole and the user's own; where it cannot be had, torch's code runs, and why."""

import errno
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.native import code_cache, jit_compiler
from amp_graph.passes.native.jit_compiler import CompilerError
from tests.passes.builds import forget_libraries
from tests.threads import in_threads
from tests.warned import without_warnings

NOBODY = 65534
LAST = '#!/bin/sh\nfor out; do [ "$last" = -o ] && break; last=$out; done'  # the output that a compiler is given
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
pytestmark = pytest.mark.skipif(os.name != "posix" or not shutil.which("cc"), reason="needs a C compiler called cc")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A compiler that copies what it made before: all of these tests compile the same."""
    folder = tmp_path_factory.mktemp("quick")
    made, file = folder / "made", folder / "cc"
    file.write_text(f'{LAST}\nif [ -f {made} ]; then cp {made} $out; else cc "$@" && cp $out {made}; fi\n')
    file.chmod(0o755)
    return file


@pytest.fixture
def source(monkeypatch, tmp_path, quick):
    """A source, and a folder that does not exist for what it is compiled to."""
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path / "kept"))
    monkeypatch.setenv("CC", str(quick))
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }")
    return source


def answer(source):
    """Load as a process does that has loaded nothing."""
    jit_compiler.load.cache_clear()
    jit_compiler._failed.clear()
    return jit_compiler.load(source).answer()


def files(kind):
    return list(jit_compiler.folder().glob(f"*.{kind}"))


def without_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")


def compiler(monkeypatch, tmp_path, script):
    """Have CC run ``script``, which counts its runs; return what says how many there were."""
    file, runs = tmp_path / "compiler", tmp_path / "runs"
    file.write_text(f"{LAST}\necho run >> {runs}\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("CC", str(file))
    return lambda: len(runs.read_text().split()) if runs.exists() else 0


# -- what is on the disk ----------------------------------------------------------------------------------


def with_content(change):
    """What puts another content in the place of a library."""

    def harm(file):
        content = file.read_bytes()
        file.unlink()  # to write into a file that is loaded ends this process, as it would any
        file.write_bytes(change(content))

    return harm


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "cut in half": with_content(lambda content: content[: len(content) // 2]),
    "cut by a byte": with_content(lambda content: content[:-1]),
    "empty": with_content(lambda content: b""),
    "zeros": with_content(lambda content: bytes(len(content))),
    "one bit": with_content(lambda content: content[:700] + bytes([content[700] ^ 1]) + content[701:]),
    "longer": with_content(lambda content: content + b"\0"),
    "text": with_content(lambda content: b"\xff\xfe not a library\n"),
    "gone": Path.unlink,
    "a pipe, which would block": a_pipe,
    "written to by others": lambda file: file.chmod(0o666),
    "of another user": lambda file: os.chown(file, NOBODY, NOBODY),
}


@pytest.mark.parametrize("damage", [pytest.param(d, marks=[as_root] * ("user" in d)) for d in DAMAGES])
def test_what_is_damaged_or_may_be_anothers_is_made_anew_and_kept(source, monkeypatch, damage):
    assert answer(source) == 42
    (file,) = files("so")
    DAMAGES[damage](file)
    assert answer(source) == 42
    (state,) = [path.stat() for path in jit_compiler.folder().iterdir()]
    assert (state.st_uid, state.st_mode & 0o022) == (os.geteuid(), 0)
    without_compiler(monkeypatch)
    assert answer(source) == 42, "the new one is loaded"


# -- whose it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_write_to_is_refused(source, mode):
    assert answer(source) == 42
    jit_compiler.folder().chmod(mode)
    with pytest.raises(CompilerError, match=r"(?s)written to by others.*legal:.*fix:.*chmod go-w"):
        answer(source)
    jit_compiler.folder().chmod(0o755)
    assert answer(source) == 42


@as_root
def test_a_user_loads_what_root_made(source, monkeypatch):
    assert answer(source) == 42
    without_compiler(monkeypatch)
    monkeypatch.setattr(code_cache.os, "geteuid", lambda: NOBODY)
    assert answer(source) == 42


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_whatever_the_umask_nobody_else_writes(source, monkeypatch, umask):
    before = os.umask(umask)
    try:
        assert answer(source) == 42
    finally:
        os.umask(before)
    made = [jit_compiler.folder(), *jit_compiler.folder().iterdir()]
    assert stat.S_IMODE(made[0].stat().st_mode) & 0o077 == 0, "private"
    assert not any(path.stat().st_mode & 0o022 for path in made)
    without_compiler(monkeypatch)
    assert answer(source) == 42


# -- places -----------------------------------------------------------------------------------------------


def test_a_folder_may_be_relative_and_a_link_to_one(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(jit_compiler.FOLDER, "beside")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "beside").symlink_to(tmp_path / "real")
    assert answer(source) == 42
    assert len(list((tmp_path / "real").iterdir())) == 1


def unknown():
    raise RuntimeError("Could not determine home directory.")


def without_a_home(folder, monkeypatch):
    monkeypatch.delenv(jit_compiler.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/not/legal")
    monkeypatch.setattr(Path, "home", unknown)


def of_another_user(folder, _):
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)


NO_FOLDERS = {
    "a dead link": (lambda folder, _: folder.symlink_to("nothing"), "kept"),
    "a file": (lambda folder, _: folder.touch(), "kept"),
    "a pipe": (lambda folder, _: os.mkfifo(folder), "kept"),
    "of another user": (of_another_user, r"belongs to another user \(65534\)"),
    "without a home": (without_a_home, "home directory"),
    "read-only": (lambda _, patch: patch.setenv(jit_compiler.FOLDER, "/proc/amp_graph"), "/proc/amp_graph"),
}
NEEDS = {
    "of another user": as_root,
    "read-only": pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place that nobody can write to"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=NEEDS.get(n, ())) for n in NO_FOLDERS])
def test_a_folder_that_cannot_be_used_is_named(source, monkeypatch, name):
    make, match = NO_FOLDERS[name]
    make(jit_compiler.folder(), monkeypatch)
    with pytest.raises(CompilerError, match=rf"(?s){match}.*fix:.*{jit_compiler.FOLDER}"):
        answer(source)


@pytest.mark.parametrize("what", ["fsync", "replace", "chmod"])
def test_a_disk_that_fails_leaves_the_library_in_use_and_no_part(source, monkeypatch, what):
    def fails(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(code_cache.os, what, fails)
    assert answer(source) == 42
    monkeypatch.undo()
    assert not list(source.parent.glob("kept/*.part"))
    assert not list(source.parent.glob("kept/.*"))


def test_another_cpu_has_a_key_of_its_own_where_the_compiler_is_told_to_use_all_of_this_one(source, monkeypatch):
    def key():
        return jit_compiler._key(source, ())

    plain = key()
    monkeypatch.setenv("CC", "cc -march=native")
    here = key()
    monkeypatch.setattr(jit_compiler, "_cpu", lambda: ("flags: sse2",))
    assert len({plain, here, key()}) == 3
    monkeypatch.setenv("CC", "another-compiler")
    assert key() == plain, "options of ours are in the key, and run wherever they are chosen"
    assert jit_compiler._key(source, ("-mavx512f",)) != plain


# -- compilers --------------------------------------------------------------------------------------------


BROKEN = {
    "hangs": ("exec sleep 300", r"took more than 0\.3 seconds"),
    "writes nothing": ("exit 0", "did not produce a valid library"),
    "writes garbage": ("echo garbage > $out", "did not produce a valid library"),
    "writes an empty file": (": > $out", "did not produce a valid library"),
    "says nothing": ("exit 3", "exit status 3"),
    "speaks no UTF-8": ("printf 'na\\377na' >&2; exit 1", "na.na"),
    "prints megabytes": ("head -c 5000000 /dev/zero | tr '\\0' x >&2; exit 1", "xxxx"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_compiler_that_fails_is_quoted_and_not_asked_again(source, monkeypatch, tmp_path, fault):
    script, match = BROKEN[fault]
    monkeypatch.setattr(code_cache, "SECONDS", 0.3 if fault == "hangs" else code_cache.SECONDS)
    runs = compiler(monkeypatch, tmp_path, script)
    for _ in range(2):
        with pytest.raises(CompilerError, match=rf"(?s){match}.*fix:") as caught:
            jit_compiler.load(source)
        assert len(str(caught.value)) < 4000
    assert runs() == 1
    assert list(jit_compiler.folder().iterdir()) == []


@pytest.mark.parametrize("words", ["'", "/etc/passwd"])
def test_a_compiler_that_is_none(source, monkeypatch, words):
    monkeypatch.setenv("CC", words)
    with pytest.raises(CompilerError, match=r"fix:"):
        answer(source)


# -- at once ----------------------------------------------------------------------------------------------


def forked(function):
    """Call ``function`` in the child of a fork, and return the child."""
    with without_warnings(Warning):
        child = os.fork()
    if not child:
        done = 1
        try:
            done = 0 if function() else 1
        finally:
            os._exit(done)
    return child


def is_true(child):
    """Wait for ``child``, and say whether what it called gave what is true."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_processes_that_compile_at_once(source, monkeypatch, tmp_path):
    """Each makes a library of its own, of other content, and whichever is kept is whole."""
    compiler(monkeypatch, tmp_path, 'sleep 0.1; cc "$@" -DBY=$$ -Wl,--build-id=0x$(printf %08d $$)')
    children = [forked(lambda: answer(source) == 42) for _ in range(3)]  # from one thread: filelock refuses more
    assert [is_true(child) for child in children] == [True] * 3
    without_compiler(monkeypatch)
    assert answer(source) == 42
    assert not files("part")


def test_who_wants_what_is_being_compiled_waits_for_it(source, monkeypatch):
    """The control: without the lock two threads compile at once."""
    jit_compiler.load.cache_clear()
    plain, begun = jit_compiler._built, []

    def slow(*args):
        begun.append(args)
        time.sleep(0.3)
        return plain(*args)

    def load_at_once(macros):
        in_threads(*[lambda: jit_compiler.load(source, macros)] * 3)
        return len(begun)

    monkeypatch.setattr(jit_compiler, "_built", slow)
    assert load_at_once(()) == 1
    monkeypatch.setattr(jit_compiler, "_locks", {(source, ("-DOTHER",)): threading.Semaphore(3)})
    assert load_at_once(("-DOTHER",)) == 4


def test_a_fork_while_a_thread_compiles(source, monkeypatch, tmp_path):
    compiler(monkeypatch, tmp_path, f'echo > {tmp_path}/begun; sleep 0.5; exec cc "$@"')
    jit_compiler.load.cache_clear()
    thread = threading.Thread(target=jit_compiler.load, args=(source,))
    thread.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert is_true(forked(lambda: answer(source) == 42))
    thread.join()
    assert answer(source) == 42


# -- without ----------------------------------------------------------------------------------------------


@pytest.mark.multiplied
@pytest.mark.parametrize("fault", ["no compiler", "a folder of others"])
def test_torchs_code_runs_instead_and_the_report_says_why(monkeypatch, tmp_path, fault):
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path))
    if fault == "no compiler":
        without_compiler(monkeypatch)
    else:
        tmp_path.chmod(0o777)
    forget_libraries()
    try:
        torch.manual_seed(0)
        plain, x = nn.TransformerEncoderLayer(64, 4, 64, 0.0, batch_first=True), torch.randn(2, 16, 64)
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(x).float()
        model = amp_graph.convert(plain, "bf16")
        found = model(x)
        found.sum().backward()
        torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)
        why = "no-such-compiler not found" if fault == "no compiler" else "may be written to by others"
        lines = [note for note in amp_graph.report(model).notes if "torch's kernels in" in note]
        assert len(lines) == 1
        assert why in lines[0]
    finally:
        forget_libraries()


def test_what_was_refused_is_not_said_under_other_settings(source, monkeypatch):
    without_compiler(monkeypatch)
    with pytest.raises(CompilerError):
        answer(source)
    assert ["answer"] in jit_compiler.why_refused().values()
    monkeypatch.delenv("CC")
    assert ["answer"] not in jit_compiler.why_refused().values()
    assert answer(source) == 42
