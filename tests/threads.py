"""Functions run by threads at once."""

import threading


def in_threads(*functions):
    """Wait for all of them, and raise what one has raised."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
