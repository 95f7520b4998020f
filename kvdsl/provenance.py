"""Where a policy comes from, which the last paragraph of its docstring says in one form.

    paper: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction ..."
    year: 2025, arXiv 2504.15364
    reach: exact
    kvpress: KeyDiffPress
    checked: formula, kvpress
    code: differs: each query head chooses

`paper: no paper` stands where there is none. `reach` is `exact`, or `approximate:` and how: it is of the paper's formula. `code` says how
far the authors' code agrees at its defaults (`AGREEMENTS`); what does not say so was not compared. `method` names the published method
where that is not the policy's name; several policies may be of one. A value goes on in the next line where that begins with no key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvdsl.errors import KvdslError

CHECKS = {
    "language": "by tests in the language, beside it",
    "formula": "by brute force of its formula (`tests/interp/test_papers.py`, `tests/gallery/test_formulas.py`)",
    "kvpress": "by the kept sets of kvpress's press (`tests/integrations/test_presses.py`)",
}
"""How a policy can have been checked, by the word of `checked`."""

NOT_COMPARED = "not compared"
AGREEMENTS = {
    "same": "it keeps, or attends to, the same tokens",
    "same with": "it does so under the conditions that follow",
    "differs:": "it does not, and what it does instead follows",
    "none released": "there is no public code",
    NOT_COMPARED: "nobody has compared it",
}
"""What `code` can begin with. `same`, `none released` and `not compared` stand alone."""

_KEYS = ("paper", "year", "method", "reach", "kvpress", "checked", "code")
_NEEDED = ("paper", "reach", "checked")
_NO_PAPER = "no paper"
_LINE = re.compile(rf"({'|'.join(_KEYS)}):\s+(.*)")
_YEAR = re.compile(r"(\d{4})(?:, arXiv (\d{4}\.\d{5}))?")
_APPROXIMATE = "approximate: "
_AGREEMENT = re.compile(rf"same|same with \S.*|differs: \S.*|none released|{NOT_COMPARED}")


@dataclass(frozen=True)
class Provenance:
    """What a policy says of its source.

    Attributes:
        paper: authors and title; None where there is none.
        year: of the paper, or of the code; None of what was never published.
        methods: the published methods that it is, by name.
        arxiv: the paper's number there, if it is known.
        how: in what it differs from the method; None if in nothing.
        presses: the classes of kvpress that do the same.
        checks: words of `CHECKS`.
        code: how far the authors' code agrees, in the form of `AGREEMENTS`.
    """

    paper: str | None
    year: int | None
    arxiv: str | None
    methods: tuple[str, ...]
    how: str | None
    presses: tuple[str, ...]
    checks: tuple[str, ...]
    code: str = NOT_COMPARED

    @property
    def exact(self) -> bool:
        """Whether it is the method, and nothing like it."""
        return self.how is None


def prose(doc: str) -> str:
    """A docstring without what it says of its source."""
    text, _ = _parted(doc)
    return text


def fields(doc: str) -> dict[str, str]:
    """What a docstring says of the source, key by key as it stands there; empty where it says nothing."""
    found: dict[str, str] = {}
    key = "paper"
    for line in _parted(doc)[1].splitlines():
        begun = _LINE.fullmatch(line.strip())
        if begun is not None:
            key, value = begun.groups()
            found[key] = value
        else:
            found[key] += f" {line.strip()}"
    return found


def provenance(name: str, doc: str) -> Provenance | None:
    """What a policy of this name says of its source; None if it says nothing.

    Raises:
        KvdslError: if something is missing, or not of the form.
    """
    found = fields(doc)
    if not found:
        return None
    missing = [key for key in _NEEDED if key not in found]
    if missing:
        raise KvdslError(f"{name} says where it comes from, but has no `{missing[0]}:`")
    year = _YEAR.fullmatch(found.get("year", ""))
    if year is None and "year" in found:
        raise KvdslError(f"{name}: `year: {found['year']}` is not of the form `2025` or `2025, arXiv 2504.15364`")
    reach = found["reach"]
    if reach != "exact" and not reach.startswith(_APPROXIMATE):
        raise KvdslError(f"{name}: `reach: {reach}` is neither `exact` nor `{_APPROXIMATE}` with how")
    checks = _listed(found["checked"])
    unknown = [check for check in checks if check not in CHECKS]
    if unknown:
        raise KvdslError(f"{name}: there is no check `{unknown[0]}`; there are {', '.join(CHECKS)}")
    code = found.get("code", NOT_COMPARED)
    if _AGREEMENT.fullmatch(code) is None:
        raise KvdslError(f"{name}: `code: {code}` has none of the forms {', '.join(f'`{form}`' for form in AGREEMENTS)}")
    return Provenance(
        paper=None if found["paper"].startswith(_NO_PAPER) else found["paper"],
        year=None if year is None else int(year[1]),
        arxiv=None if year is None else year[2],
        methods=_listed(found.get("method", name)),
        how=None if reach == "exact" else reach.removeprefix(_APPROXIMATE),
        presses=_listed(found.get("kvpress", "")),
        checks=checks,
        code=code,
    )


def _parted(doc: str) -> tuple[str, str]:
    """A docstring's prose, and its last paragraph if that is of the form."""
    *before, last = re.split(r"\n\s*\n", doc.strip())
    return ("\n\n".join(before), last) if before and last.strip().startswith("paper: ") else (doc.strip(), "")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
