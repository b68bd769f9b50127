"""Commands in this process, over a file of the module's models: ``SOURCE``."""

import pytest

from amp_graph.cli.main import main


@pytest.fixture
def file(request, tmp_path):
    """Return the path of a file with the models of the tests."""
    path = tmp_path / f"{request.module.__name__.rpartition('.')[2]}_models.py"
    path.write_text(request.module.SOURCE)
    return str(path)


@pytest.fixture
def amp(file, capsys):
    """Run a command, in which FILE is that file: (status, stdout, stderr)."""

    def run(*words):
        return (main([word.replace("FILE", file) for word in words]), *capsys.readouterr())

    return run
