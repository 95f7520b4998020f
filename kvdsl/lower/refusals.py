"""What neither the C++ nor the Triton kernels know; the torch backend serves such policies."""

from __future__ import annotations

from collections.abc import Mapping

from kvdsl.ir.nodes import Policy, Select
from kvdsl.lower.expression import NotLowerable, reads


def refuse_statements(policy: Policy, own: Mapping[str, bool]) -> None:
    """Refuse what kernels of any kind do not know.

    Args:
        own: what these kernels do not know besides, in words, and whether the policy states it.

    Raises:
        NotLowerable: if the policy states any of it.
    """
    decodes = policy.when != "prefill"
    reads_pages = decodes or policy.select is not None  # what a prompt has left is selected from as well
    refused = {
        "a budget that reads what is cached": policy.measured is not None and decodes,
        "a count of `select` that reads what is cached": policy.select is not None and policy.select.measured is not None,
        "`pages` of what eviction leaves": policy.pages is not None and policy.budget is not None and reads_pages,
        "`pages` that do not begin with the text": policy.pages_after is not None and reads_pages,
        **own,
    }
    found = [statement for statement, stated in refused.items() if stated]
    if found:
        raise NotLowerable(", ".join(found))


def refuse_select(policy: Policy, select: Select) -> None:
    """Refuse what a kernel cannot select by: it sees one KV head.

    Raises:
        NotLowerable: if the policy does.
    """
    if policy.heads_vote:
        raise NotLowerable("`select` by what all KV heads find (`over heads`): a kernel sees one")
    if reads(select.by, "query_head"):
        raise NotLowerable("`select` by a query head's number")
