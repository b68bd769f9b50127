"""The model zoo: unmodified third-party models at tiny sizes, converted, trained and measured, a table row each.

``python -m tests.zoo`` (``make zoo``) runs every model of the tables in a process of its own, in bf16 and fp16.
``model`` says what an entry is, ``catalogue`` collects the tables (a module for each family of packages), ``trial``
holds what is done with one model, ``errors`` compares its errors with autocast's, ``warm`` and ``limits`` run it in a
fork, ``results`` keeps the rows and ``table`` writes the page. ``causes.json`` says why an error is what it is.
"""
