"""Check the tests of a file without running them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvdsl import codes
from kvdsl.budget import as_written
from kvdsl.diagnostics import Diagnostic, Label, Sink, did_you_mean, listed
from kvdsl.ir.nodes import Input, Policy
from kvdsl.ir.printer import print_number
from kvdsl.ir.visitors import expressions, parts_of
from kvdsl.passes.columns import add_columns
from kvdsl.reference import PLACES, VALUES, VECTORS
from kvdsl.sema.check import Checker
from kvdsl.sema.modules import Module, import_of
from kvdsl.sema.resolve import resolve
from kvdsl.sema.scope import Scope
from kvdsl.sema.settings import Setting
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn

MAX_TESTS = 100
MAX_STEPS = 500


@dataclass(frozen=True)
class Scenario:
    """A test that its policy can run.

    Attributes:
        test: the syntax.
        policy: the policy with the test's settings, on state columns; None if it is refused, as the test expects.
        layer, layers: the layer, counted from 0, and the number of layers.
        heads: the number of KV heads.
        group: the number of query heads of each.
        key_dim, value_dim: the sizes of keys and values; 1, and every number 0, if the test gives none.
    """

    test: syn.Test
    policy: Policy | None
    layer: int = 0
    layers: int = 1
    heads: int = 1
    group: int = 1
    key_dim: int = 1
    value_dim: int = 1

    @property
    def title(self) -> str:
        """The test's title."""
        return self.test.title.text


def check_scenarios(module: Module, prelude: Callable[[], Scope], sink: Sink) -> tuple[Scenario, ...]:
    """Return the runnable tests of a file; errors in others go to the sink.

    Args:
        prelude: makes the scope around a policy's names.
    """
    _check_apart(module, sink)
    imports_failed = any(found.severity == "error" and found.span.file is not module.file for found in sink)
    if module.broken or imports_failed:
        return ()
    titles: dict[str, Span] = {}
    scenarios = []
    for test in module.syntax.tests[MAX_TESTS:][:1]:
        sink.report(codes.TOO_LARGE, test.title.span, f"a file holds at most {MAX_TESTS} tests")
    for test in module.syntax.tests[:MAX_TESTS]:
        title = test.title
        if title.text in titles:
            labels = [Label(titles[title.text], "the first one")]
            sink.report(codes.DUPLICATE, title.span, f"two tests are called {title.span.quoted()}", labels=labels)
        titles.setdefault(title.text, title.span)
        if sum(len(step.tokens) or 1 for step in test.steps) > MAX_STEPS:
            sink.report(codes.TOO_LARGE, title.span, f"the test has more than {MAX_STEPS} steps")
        elif not test.broken:
            scenarios.append(_Check(test, module, prelude, sink).check())
    return tuple(scenario for scenario in scenarios if scenario is not None)


def _check_apart(module: Module, sink: Sink) -> None:
    help = f"put the tests into `{module.file.stem.removesuffix('_test')}_test.kv` and import the policy there"
    for policy in module.syntax.policies:
        sink.report(codes.TESTS_APART, policy.name.span, "a file with tests cannot hold a policy", help)
    for let in module.syntax.lets:
        sink.report(codes.TESTS_APART, let.name.span, "a file with tests cannot hold a let", "write the numbers")


@dataclass
class _Check:
    """Checks one test; `failed` after a report of an error."""

    test: syn.Test
    module: Module
    prelude: Callable[[], Scope]
    sink: Sink
    failed: bool = field(default=False)

    def check(self) -> Scenario | None:
        self._order()
        use = next(iter(self.test.of(syn.Use)), None)
        heads, group = self._heads(), self._same_size(self._brought("query"), "query heads")
        key_dim, value_dim = max(1, self._dims("query", "key")), max(1, self._dims("value"))
        policy = None if use is None else self._policy(use)
        if use is None or self.failed:
            return None
        layer, layers = self._layer(use)
        if policy is not None and policy.across_layers is not None and layers > 1:
            message = f"the layers of `{policy.name}` share a budget, but a test has one layer"
            self._report(codes.TEST_STEP, use.span, message, "leave out `set layers`: a single layer shares with no other")
        if policy is not None:
            _Meaning(policy, self.test, self._report).check()
        found = Scenario(self.test, policy, layer, layers, heads, group or 1, key_dim, value_dim)
        return None if self.failed else found

    def _report(
        self, code: codes.Code, span: Span, message: str, help: str | None = None, labels: Iterable[Label] = ()
    ) -> None:
        self.sink.report(code, span, message, help, labels)
        self.failed |= code.severity == "error"

    # -- the order of steps ------------------------------------------------------------------------------------------

    def _order(self) -> None:
        steps = self.test.steps
        if not self.test.of(syn.Use):
            self._report(
                codes.TEST_POLICY, self.test.title.span, "the test does not name its policy", "begin it with `use NAME`"
            )
        for at, step in enumerate(steps):
            before = steps[:at]
            if isinstance(step, syn.Expect):
                self._order_of_expect(step, before)
            else:
                self._order_of_others(step, before)
        if not self.test.of(syn.Expect):
            help = "a test checks something after its last token, such as `expect kept 0, 2`"
            self._report(codes.TEST_OF_NOTHING, self.test.title.span, "the test expects nothing", help)

    def _order_of_others(self, step: syn.Step, before: tuple[syn.Step, ...]) -> None:
        token = next((one for one in self.test.texts if one in before), None)
        match step:
            case syn.Use():
                self._setting(step, before, token, codes.TEST_POLICY, "a test is about one policy", "write two tests")
            case syn.Set():
                self._setting(step, before, token, codes.TEST_SETTING, f"`{step.name.text}` is set twice", None)
            case syn.Prompt():
                self._prompt(step, is_first=token is None)

    def _setting(
        self,
        step: syn.Use | syn.Set,
        before: tuple[syn.Step, ...],
        token: syn.Step | None,
        code: codes.Code,
        twice: str,
        help: str | None,
    ) -> None:
        """Report a `use` or `set` that is there twice, or comes after a token."""
        if (same := next((one for one in before if _name(one) == _name(step)), None)) is not None:
            self._report(code, step.span, twice, help, [Label(same.span, "first here")])
        if token is not None:
            word = step.span.text.split()[0]
            self._report(
                codes.TEST_ORDER, step.span, f"`{word}` comes after a token", None, [Label(token.span, "the first token")]
            )

    def _prompt(self, prompt: syn.Prompt, *, is_first: bool) -> None:
        if not prompt.tokens:
            self._report(codes.TEST_ORDER, prompt.span, "the prompt has no tokens", "leave it out")
        elif not is_first and sum(token.times for token in prompt.tokens) == 1:
            help = "write the token alone, without `prompt { }`"
            self._report(codes.TEST_ORDER, prompt.span, "after other tokens, a single token is not a prompt", help)
        kinds = {_is_attended(token) for token in prompt.tokens}
        if len(kinds) > 1:
            self._report(codes.TEST_ORDER, prompt.span, "a prompt's tokens are all `attend`, or all `token`")

    def _order_of_expect(self, step: syn.Expect, before: tuple[syn.Step, ...]) -> None:
        refused = next((one for one in before if _name(one) == "error"), None)
        if step.what != "error" and not any(one in before for one in self.test.texts):
            self._report(codes.TEST_ORDER, step.span, "no token has arrived yet")
        elif refused is not None:
            labels = [Label(refused.span, "an error is expected here")]
            self._report(codes.TEST_ORDER, step.span, "a refused policy does nothing", labels=labels)

    # -- sizes -------------------------------------------------------------------------------------------------------

    def _tokens(self) -> Iterator[syn.Incoming]:
        for step in self.test.texts:
            yield from step.tokens

    def _brought(self, *kinds: str) -> list[syn.Brought]:
        return [one for token in self._tokens() for one in token.brought if one.kind in kinds]

    def _heads(self) -> int:
        """Return the number of KV heads of the test."""
        for token in self._tokens():
            kinds: set[str] = set()
            for one in token.brought:
                kind = one.kind if one.name is None else one.name.text
                if kind in kinds:
                    self._report(codes.TEST_SIZE, one.span, f"`{kind}` is given twice")
                kinds.add(kind)
        expects = [(step.span, len(step.heads)) for step in self.test.of(syn.Expect) if step.heads]
        counts = [*((one.span, len(one.heads)) for one in self._brought("attend", "given", *VECTORS)), *expects]
        several = [(span, count) for span, count in counts if count > 1]
        for span, count in several[1:]:
            if count != several[0][1]:
                self._unequal("KV heads", span, count, *several[0])
        return several[0][1] if several else 1

    def _same_size(self, brought: list[syn.Brought], what: str) -> int:
        """Return the number of query heads of each KV head."""
        counts = [(one.span, len(heads)) for one in brought for heads in one.heads]
        for span, count in counts[1:]:
            if count != counts[0][1]:
                self._unequal(what, span, count, *counts[0])
        return counts[0][1] if counts else 0

    def _dims(self, *kinds: str) -> int:
        """Return the size of the vectors."""
        rows = [row for one in self._brought(*kinds) for heads in one.heads for row in heads]
        for row in rows:
            if row.rest is not None:
                self._report(codes.TEST_SIZE, row.span, "a vector has no `rest`", "write all of its numbers")
        for row in rows[1:]:
            if len(row.values) != len(rows[0].values):
                self._unequal("numbers", row.span, len(row.values), rows[0].span, len(rows[0].values))
        return len(rows[0].values) if rows else 0

    def _unequal(self, what: str, span: Span, count: int, first: Span, expected: int) -> None:
        message = f"expected {expected} {what}, as before, not {count}"
        self._report(codes.TEST_SIZE, span, message, labels=[Label(first, f"{expected} here")])

    # -- the policy --------------------------------------------------------------------------------------------------

    def _layer(self, use: syn.Use) -> tuple[int, int]:
        said = {one.name.text: one.value for one in self.test.of(syn.Set)}
        layer, layers = use.layer or said.get("layer"), use.layers or said.get("layers")
        number, count = (default if one is None else one.value for one, default in ((layer, 0.0), (layers, 1.0)))
        if number.is_integer() and count.is_integer() and 0 <= number < count:
            return int(number), int(count)
        span = next(one.span for one in (layer, layers) if one is not None)
        message = f"there is no layer {print_number(number)} of {print_number(count)}"
        self._report(codes.TEST_STEP, span, message, "layers count from 0: `set layer = 2` and `set layers = 8`")
        return 0, 1

    def _policy(self, use: syn.Use) -> Policy | None:
        """Return the policy with the test's settings; None after a report, or if it is refused as expected."""
        found = next((pair for pair in self.module.policies() if pair[0].name.text == use.policy.text), None)
        if found is None:
            known = [policy.name.text for policy, _ in self.module.policies()]
            help = did_you_mean(use.policy.text, known) or (
                f"the imported policies are {listed(known, 'and')}" if known else import_of(use.policy.text)
            )
            self._report(codes.UNKNOWN_POLICY, use.policy.span, f"unknown policy `{use.policy.text}`", help)
            return None
        settings = self._settings(*found)
        policy, errors = self._checked(*found, settings)
        expected = self.test.expected_error
        if expected is not None and expected.word is not None and any(expected.word.text in e.message for e in errors):
            return None
        if errors and settings:
            errors = self._checked(*found, {})[1] or [self._refused(use, error) for error in errors]
        for error in errors:
            self._report(codes.CODES[error.code], error.span, error.message, error.help, error.labels)
        return None if policy is None else add_columns(policy)

    def _settings(self, policy: syn.Policy, where: Module) -> dict[str, Setting]:
        names = resolve(policy, where, Sink()).params
        settings = {}
        for step in self.test.of(syn.Set):
            if step.name.text in ("layer", "layers"):
                continue
            if step.name.text not in names:
                help = did_you_mean(step.name.text, names)
                if help is None and names:
                    help = f"the params are {listed(names, 'and')}"
                message = f"`{policy.name.text}` has no param `{step.name.text}`"
                self._report(codes.TEST_SETTING, step.name.span, message, help)
            elif not abs(step.value.value) < float("inf"):
                self._report(codes.TEST_SETTING, step.value.span, f"`{step.name.text}` needs a number")
            else:
                settings[step.name.text] = Setting(as_written(step.value.value, step.value.span.text), step.value.span)
        return settings

    def _checked(
        self, policy: syn.Policy, where: Module, settings: dict[str, Setting]
    ) -> tuple[Policy | None, list[Diagnostic]]:
        sink = Sink()
        checked = Checker(resolve(policy, where, sink), self.prelude(), sink, settings).check()
        return checked, [found for found in sink.sorted(self.module.file) if found.severity == "error"]

    def _refused(self, use: syn.Use, error: Diagnostic) -> Diagnostic:
        """Report in the test's file an error caused by its settings."""
        here = error.span.file is self.module.file
        labels = () if here else (Label(error.span, "refused here"),)
        span = error.span if here else use.span
        return Diagnostic(codes.TEST_SETTING.id, "error", error.message, span, error.help, labels)


def _name(step: syn.Step) -> str:
    """Return a name for a step that may occur once."""
    match step:
        case syn.Set():
            return f"set {step.name.text}"
        case syn.Expect():
            return step.what
    return type(step).__name__


def _is_attended(token: syn.Incoming) -> bool:
    return any(one.kind == "attend" for one in token.brought)


@dataclass
class _Meaning:
    """Checks that the policy has what the steps refer to."""

    policy: Policy
    test: syn.Test
    report: Callable[..., None]

    def check(self) -> None:
        """Check every step."""
        decoded, first = False, True
        for step in self.test.steps:
            match step:
                case syn.Prompt():
                    self._prompt(step, sized=first)
                    decoded = first = False
                case syn.Turn() if first:
                    self.report(codes.TEST_STEP, step.span, "no token has arrived, so no turn has ended")
                case syn.Incoming():
                    decoded, first = not first or step.times > 1, False  # the very first token is a prompt
                    self._token(step)
                case syn.Expect():
                    self._expect(step, decoded)

    def _prompt(self, prompt: syn.Prompt, *, sized: bool) -> None:
        """Check a prompt's tokens. `sized`: no token came before, so the size of each row of attention is known."""
        there = 0
        for token in prompt.tokens:
            self._token(token)
            attends = next((one for one in token.brought if one.kind == "attend"), None) if sized else None
            for (row,) in attends.heads if attends is not None else ():
                self._row(row, there + 1)
                if token.times > 1 and row.fits(there + 1):
                    self._row(row, there + token.times)
            there += token.times

    def _row(self, row: syn.Row, there: int) -> None:
        if not row.fits(there):
            numbers, help = "one number", None
            if there > 1:
                numbers, help = f"{there} numbers", f"the prompt has {there} tokens up to this one"
            self.report(codes.TEST_SIZE, row.span, f"expected {numbers}, not {len(row.values)}", help)

    def _token(self, token: syn.Incoming) -> None:
        self._given(token)
        if not _is_attended(token):
            return
        query = next((one for one in token.brought if one.kind == "query"), None)
        if query is not None:
            message = "`attend` replaces the query, so the query would have no effect"
            self.report(codes.TEST_STEP, query.span, message, "write one of them")
            return
        exprs = [*expressions(self.policy), *(column.body for column in self.policy.columns)]
        reads = {part.name for expr in exprs for part in parts_of(expr, Input)}
        why = "selects what a query attends to" if self.policy.select is not None else None
        why = "reads the prompt's queries" if why is None and self.policy.reads_text else why
        why = next((f"reads `{name}`" for name in ("q", "logit") if name in reads), None) if why is None else why
        if why is not None:
            message = f"`{self.policy.name}` {why}, which `attend` does not provide"
            self.report(codes.TEST_STEP, token.span, message, "write `token query 1, 0 key 0, 1`, say")

    def _given(self, token: syn.Incoming) -> None:
        """Check a token's given values against those that the policy reads."""
        brought = [(one, one.name) for one in token.brought if one.name is not None]
        known = [given.name for given in self.policy.given if given.source != "turn"]
        for one, name in brought:
            if name.text not in known:
                help = did_you_mean(name.text, [*known, *VECTORS]) or (
                    f"its inputs are {listed(known, 'and')}" if known else None
                )
                self.report(codes.TEST_STEP, name.span, f"`{self.policy.name}` has no input `{name.text}`", help)
            for (row,) in one.heads:
                if row.rest is not None or len(row.values) != 1:
                    help = "separate the values of KV heads by `/`"
                    self.report(codes.TEST_SIZE, row.span, "a given value is one number of the token", help)
        for given in self.policy.given:
            if given.default is None and given.name not in [name.text for _, name in brought]:
                message = f"`{self.policy.name}` needs `{given.name}` of every token, which has no default"
                self.report(codes.TEST_STEP, token.span, message, f"write `{given.name} 0.5` after the token, say")

    def _expect(self, step: syn.Expect, decoded: bool) -> None:
        columns = [column.name for column in self.policy.columns if column.rule != "ring"]
        if step.what == "score" and self.policy.score is None:
            self.report(codes.TEST_STEP, step.span, f"`{self.policy.name}` has no score")
        elif step.what == "sketch" and self.policy.sketch is None:
            self.report(codes.TEST_STEP, step.span, f"`{self.policy.name}` has no sketch")
        elif step.what == "selected" and self.policy.select is None:
            self.report(codes.TEST_STEP, step.span, f"`{self.policy.name}` selects nothing")
        elif step.what == "selected" and not decoded:
            self.report(codes.TEST_STEP, step.span, "a prompt's queries attend to everything")
        elif step.what == "state" and step.word is not None and step.word.text not in columns:
            known = [*PLACES, *VALUES, *columns]
            help = did_you_mean(step.word.text, known) or f"a test can expect {listed([*known, 'error'], 'or')}"
            self.report(codes.TEST_STEP, step.word.span, f"`{self.policy.name}` has no state `{step.word.text}`", help)
