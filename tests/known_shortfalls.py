"""What does not hold yet, test by test, with the reason: each is run, reported as an expected failure, to be mended.

Nothing here loosens a bound: the tests stand as they should be, and a line leaves this table when its test passes.
"""

CASTS = "tests/conformance/test_casts.py::"

SHORTFALLS = {
    "tests/conformance/test_accuracy.py::test_the_corpus_is_as_exact_as_autocast[bf16]": (
        "mixtral_eager, 1.42: its loop over experts escapes capture, and rounding sends tokens to other experts"
    ),
    CASTS + "test_never_more_casts_than_autocast[mixtral_eager]": "the values at a graph break return to fp32",
    "tests/conformance/test_parity.py::test_every_operation_has_the_dtype_that_autocast_gives_it[mixtral_eager]": (
        "its experts' loop breaks the graph, and the pieces exchange fp32"
    ),
}
