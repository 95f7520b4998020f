"""What stands several times in a function is computed once; the function goes on meaning the same."""

from __future__ import annotations

from kvdsl.lower.sharing import shared


def test_the_largest_gets_a_name_first_and_parts_of_it_are_named_before_it() -> None:
    lines = [
        'c = row.column("c")',
        'columns.sum("a", (row.k - c).amin(-1) + torch.exp(row.k - c))',
        'columns.max("b", torch.floor((row.k - c).amin(-1)))',
    ]
    assert shared(lines) == (
        'c = row.column("c")',
        "difference_1 = row.k - c",
        "amin_2 = difference_1.amin(-1)",
        'columns.sum("a", amin_2 + torch.exp(difference_1))',
        'columns.max("b", torch.floor(amin_2))',
    )


def test_what_several_lines_return_is_looked_at_together() -> None:
    lines = ["return {", '    "a": row.attn * 2 + 1,', '    "b": torch.exp(row.attn * 2),', "}"]
    assert shared(lines)[0] == "product_1 = row.attn * 2"
    assert shared(lines)[-2] == '    "b": torch.exp(product_1),'


def test_views_literals_and_what_a_lambda_has_stay_where_they_are() -> None:
    lines = [
        "return torch.where(row.k.unsqueeze(2) > -torch.inf, row.k.unsqueeze(2), -torch.inf)",
        'return slots.text.over("sum", lambda text: text.q * 2 + text.q * 2)',
    ]
    for line in lines:
        assert shared([line]) == (line,)


def test_what_is_called_like_a_new_name_keeps_its_name() -> None:
    lines = ['x__2 = slots.column("x__2")', "return (x__2 + row.age * 2) / (row.age * 2)"]
    assert shared(lines) == (lines[0], "product_1 = row.age * 2", "return (x__2 + product_1) / product_1")


def test_names_that_stand_there_already_are_not_taken() -> None:
    lines = ['product_1 = row.column("product_1")', "return (product_1 * 2).exp() + (product_1 * 2)"]
    assert shared(lines)[1:] == ("product_2 = product_1 * 2", "return product_2.exp() + product_2")
