"""All for which a condition holds, and how often each counts: what `select where` and `weight` are, and what they do not go with."""

from __future__ import annotations

import pytest

from kvdsl.ir.printer import print_policy
from tests.diagnostics.expect import body, check, only, policy

EACH = "group each"


def test_the_newest_token_is_among_them() -> None:
    assert policy("select where norm2(k) > 1") == policy(
        "select top sum(norm2(k) > 1 or age < floor(1) over slots) by norm2(k) > 1"
    )


@pytest.mark.parametrize(
    "lines",
    [
        ("select where norm2(k) > 1 weight norm2(v)",),
        ("select top 8 by dot(q, k) weight 1 / (age + 1) in layers 1..",),
        (EACH, "select where random() < 0.5 or dot(q, k) > 0 weight exp(-dot(q, k))", "keep first 4"),
    ],
)
def test_what_is_printed_means_the_same(lines: tuple[str, ...]) -> None:
    found = policy(*lines)
    again = check(print_policy(found)).policy
    assert again.model_copy(update={"stem": found.stem}) == found


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        (("select where norm2(k)",), "KV0303", "needs a condition"),
        (("select where dot(q, k) > 0",), "KV0442", "select together"),
        (("pages 4", "select where norm2(k) > 1"), "KV0308", "single tokens"),
        (("select where sum(norm2(k) over heads) > 1",), "KV0412", "cannot read `over heads`"),
        (("select where attn > 0",), "KV0315", "no `attn` yet"),
        (("select top 4 by dot(q, k) weight sum(norm2(k) over heads)",), "KV0412", "cannot read `over heads`"),
        (("select top 4 by dot(q, k) weight mean(attn)",), "KV0315", "cannot be reduced over queries"),
        (("select top 4 by dot(q, k) weight k",), "KV0314", "one number per slot"),
        (("select top 4 by dot(q, k) weight age in layers 1 reused above",), "KV0441", "belongs to the layer that selects"),
    ],
)
def test_what_is_refused(lines: tuple[str, ...], code: str, says: str) -> None:
    assert says in only(body(*lines), code).message
