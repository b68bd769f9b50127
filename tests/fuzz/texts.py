"""Texts that nobody would write: by grammars, by changes to valid ones, and of bytes without any order."""

import random
import string

ODD = (
    "", " ", "\0", "\n", "\t", "\\", '"', "'", "=", ",", "|", "-", "..", "[", "]", "{", "}", "#", ".", "~", "/", "é",
    "٣", "\ud800", "\u202e", "\ufeff", "nan", "inf", "-inf", "1e308", "1e-308", "1e400", "-0", "0x10", "1_0",
    "true", "True", "None", "null", "../", "/dev/zero", "/dev/full", "~nobody/x.toml", ".toml", "a.toml\0",
    "1979-05-27", "07:32:00", "9" * 30, str(10**400), "9" * 5000, "x" * 3000, "/" + "y" * 300 + ".toml", "(" * 200,
    "[" * 3000, "{a=" * 800, "a." * 2000, "\\," * 50, "%s%n", "{0}", "$(id)", "__class__", "__init__",
)  # fmt: skip
EVIL = ("(a+)+b", "(a|aa)+$", "(.*)*x", "(a{1,1000}){1,1000}", "(?=(a*)*b)" * 20, "(" * 60 + ")" * 60, "a{99999999999}",
        r"(a)\1", "(?P<n>a)(?P=n)", "(a)(?(1)b)", "(?>a)", "[", "*", "(?i)LM_HEAD", "a++", "(?<=a+)b",
        "((((((a?){9}){9}){9}){9}){9}){9}",
        ".*a.*a.*a.*a.*b", "[[:alpha:]]", "(?x) a # b", "\\")  # fmt: skip


def mutated(rng: random.Random, text: str) -> str:
    """Change some places of ``text``: take out, put in, double, swap, cut."""
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        if rng.random() < 0.7:
            b = min(b, a + rng.randrange(8))
        part = text[a:b]
        more = part * 50 if len(part) < 9 else ""
        new = rng.choice(("", part * 2, part[::-1], rng.choice(ODD), rng.choice(string.printable), part.upper(), more))
        text = text[:a] + new + text[b:]
    return text


def word(rng: random.Random, words) -> str:
    """One of ``words``, mostly, or what is none."""
    return rng.choice(words) if rng.random() < 0.93 else rng.choice((*ODD, *EVIL, mutated(rng, rng.choice(words))))


def encoded(rng: random.Random, text: str) -> bytes:
    """The bytes of ``text``; now and then some that are no UTF-8."""
    data = text.encode("utf-8", rng.choice(("surrogatepass", "replace")))
    if rng.random() < 0.1 and data:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.randrange(1, 6)) + data[at:]
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.03 else data
