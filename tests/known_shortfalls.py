"""What does not hold yet, test by test, with the reason: each is run, reported as an expected failure, to be mended.

Nothing here loosens a bound: the tests stand as they should be, and a line leaves this table when its test passes.
"""

CASTS = "tests/conformance/test_casts.py::"

SHORTFALLS = {
    CASTS + "test_casts_of_activations_as_exact_as_autocast[gpt2]": (
        "a layer needs a cast of each norm's output, of its gradient and of both residual gradients, as autocast's"
    ),
    CASTS + "test_casts_of_activations_as_exact_as_autocast[vit]": (
        "a pre-norm block needs six casts to autocast's ten, and the ends of the model six to its seven: 0.61"
    ),
}
