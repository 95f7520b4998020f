"""The faults that are planted: one line of a room each, wrong, and the tests that ought to find it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A small mistake.

    Attributes:
        room: which part of the project has it.
        file, old, new: what is replaced there, once.
        tests: where to look, in this order; the gate's tests of all of it before the nightly ones.
    """

    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _fault(room: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(room, file, old, new, tests)


STEPS = tuple(f"tests/differential/test_{name}.py" for name in ("operations", "statements", "random", "policies"))
"""A step of every backend, from the interpreter's state."""

FAULTS = [
    # -- the front end -----------------------------------------------------------------------------------------------------
    _fault(
        "syntax",
        "kvdsl/syntax/lexer.py",
        'if token.type == "_SEP" and token == "\\n" and depth:',
        'if token.type == "_SEP" and token == "\\n" and depth > 1:',
        "tests/syntax",
    ),
    _fault(
        "syntax",
        "kvdsl/syntax/lexer.py",
        "begin + len(text[begin:at]) - len(text[begin:at].lstrip())",
        "begin",
        "tests/syntax",
        "tests/diagnostics",
    ),
    _fault(
        "syntax",
        "kvdsl/syntax/formatter.py",
        "entries[index + 1].entry.blank = True",
        "entries[index + 1].entry.blank = False",
        "tests/syntax",
    ),
    _fault(
        "syntax",
        "kvdsl/syntax/formatter.py",
        "if len(run) > 1 and all(width + 1 + len(one.rest) <= WIDTH for one in run):",
        "if len(run) > 1:",
        "tests/syntax",
    ),
    _fault(
        "check",
        "kvdsl/sema/reductions.py",
        "elif body.axes != {Axis.SLOT, Axis.DIM}:",
        "elif not body.axes <= {Axis.SLOT, Axis.DIM}:",
        "tests/sema",
    ),
    _fault(
        "check",
        "kvdsl/sema/reductions.py",
        "if over.axis not in (Axis.OTHER, Axis.DIM) and self.is_of_other(node, body):",
        "if over.axis is Axis.SLOT and self.is_of_other(node, body):",
        "tests/sema",
    ),
    _fault(
        "check",
        "kvdsl/sema/params.py",
        "if low is not None and high is not None and low > high:",
        "if low is not None and high is not None and low >= high:",
        "tests/sema",
    ),
    _fault(
        "check",
        "kvdsl/sema/params.py",
        "if 0 < number < 1 or (is_written",
        "if 0 < number <= 1 or (is_written",
        "tests/sema",
        "tests/hf",
    ),
    _fault(
        "check",
        "kvdsl/sema/protected.py",
        "if count <= moment.room or not self.parts.keeps:",
        "if count < moment.room or not self.parts.keeps:",
        "tests/sema",
    ),
    _fault(
        "check",
        "kvdsl/sema/statics.py",
        "if low is not None and high is not None and first is not None and last is not None and first > last:",
        "if low is not None and high is not None and first is not None and last is not None and first > last + 1:",
        "tests/sema",
    ),
    _fault(
        "check",
        "kvdsl/sema/upgrade.py",
        'yield value.to(most), f"min({value.text}, {most.text})"',
        'yield value.to(most), f"max({value.text}, {most.text})"',
        "tests/sema",
        "tests/cli",
    ),
    # -- passes ------------------------------------------------------------------------------------------------------------
    _fault(
        "passes",
        "kvdsl/passes/fold.py",
        "return 1 if 0 < count < 1 else math.floor(count)",
        "return math.floor(count)",
        "tests/sema",
        "tests/interp",
        "tests/runtime",
    ),
    _fault(
        "passes",
        "kvdsl/passes/columns.py",
        "meaning = (rule, body, decay or size)",
        "meaning = (rule, body, size)",
        "tests/lower",
        "tests/interp",
        *STEPS,
    ),
    _fault(
        "passes",
        "kvdsl/passes/columns.py",
        'order = {"token": 0, "ring": 2}',
        'order = {"token": 2, "ring": 0}',
        "tests/lower",
        *STEPS,
    ),
    _fault(
        "passes",
        "kvdsl/passes/normal.py",
        'opposite = {"==": "!=", "!=": "=="}',
        'opposite = {"==": "!=", "!=": "==", "<": ">="}',
        "tests/lower",
        "tests/sema",
        "tests/interp",
        *STEPS,
    ),
    _fault(
        "passes",
        "kvdsl/passes/normal.py",
        "if key == ahead:\n                return other.body, 0",
        "if key == ahead:\n                return other.body, 1",
        "tests/sema",
        "tests/lower",
    ),
    _fault(
        "passes",
        "kvdsl/passes/normal.py",
        'older = body, Other(body=body), Binary(op="<", left=Other(body=POSITION), right=POSITION)',
        'older = body, Other(body=body), Binary(op=">", left=Other(body=POSITION), right=POSITION)',
        "tests/interp",
        *STEPS,
    ),
    # -- the interpreter ---------------------------------------------------------------------------------------------------
    _fault(
        "interpreter",
        "kvdsl/interp/settle.py",
        "return 0\n    return max(0, int(live + 1 - _target(live + 1, numbers)))",
        "return 0\n    return max(0, int(live - _target(live, numbers)))",
        "tests/interp",
    ),
    _fault(
        "interpreter", "kvdsl/interp/settle.py", "np.where(position == position.max(initial=-1), 2, 1)", "1", "tests/interp"
    ),
    _fault(
        "interpreter",
        "kvdsl/interp/settle.py",
        "return _lowest(ascending(by, position)[::-1], count)",
        "return _lowest(np.argsort(-by, kind='stable'), count)",
        "tests/interp",
        *STEPS,
    ),
    _fault(
        "interpreter",
        "kvdsl/interp/attention.py",
        "visible & (newest - position < window)",
        "visible & (newest - position <= window)",
        "tests/interp",
    ),
    _fault(
        "interpreter",
        "kvdsl/interp/memory.py",
        "average = decay * average + (1 - decay) * value",
        "average = (1 - decay) * average + decay * value",
        "tests/interp",
    ),
    _fault(
        "interpreter",
        "kvdsl/interp/memory.py",
        "at_least_one(moment.number(leaf.last)) + 1)",
        "at_least_one(moment.number(leaf.last)))",
        "tests/interp",
    ),
    _fault(
        "interpreter",
        "kvdsl/interp/settle.py",
        "if found[layer] >= live[layer]}",
        "if found[layer] > live[layer] + 1}",
        "tests/interp",
    ),
    # -- lowering ----------------------------------------------------------------------------------------------------------
    _fault(
        "lowering",
        "kvdsl/lower/cpp.py",
        'defaults = {"trigger": "1", "slack": "0", "max_drop": "0"}\n    return',
        'defaults = {"trigger": "1", "slack": "1", "max_drop": "0"}\n    return',
        "tests/lower",
        *STEPS,
    ),
    _fault(
        "lowering",
        "kvdsl/lower/cpp.py",
        'places = [keep for keep in policy.keeps if keep.scope in ("first", "last")]',
        'places = [keep for keep in policy.keeps if keep.scope == "last"]',
        "tests/lower",
        *STEPS,
    ),
    _fault(
        "lowering",
        "kvdsl/lower/cpp_expressions.py",
        'return fragment("kvdsl::rounded({})", made) if product else made',
        "return made",
        "tests/lower",
        *STEPS,
    ),
    _fault("lowering", "kvdsl/lower/torch_expressions.py", '".mean(1, keepdim=True)" if agreed else ""', '""', *STEPS),
    _fault(
        "lowering",
        "kvdsl/lower/torch_expressions.py",
        "return super().number(as_float32(value))",
        "return super().number(value)",
        "tests/lower",
        *STEPS,
    ),
    _fault(
        "lowering",
        "kvdsl/lower/triton.py",
        'new = fragment("{} + ops.square({})", old, body)',
        'new = fragment("{} + {}", old, body)',
        "tests/triton",
    ),
    _fault(
        "lowering",
        "kvdsl/lower/triton.py",
        '(("first", "<="), ("last", ">="))',
        '(("first", "<"), ("last", ">="))',
        "tests/triton",
    ),
    _fault(
        "lowering",
        "kvdsl/lower/triton.py",
        '"`victims shared by layers`": policy.victims == "layers",\n',
        "",
        "tests/lower",
        *STEPS,
        "tests/triton",
    ),
    # -- torch -------------------------------------------------------------------------------------------------------------
    _fault(
        "torch",
        "kvdsl/runtime/torch/settle.py",
        "self._add(_standings(key) < _tokens(count))",
        "self._add(_standings(key) <= _tokens(count))",
        *STEPS,
        "tests/runtime",
    ),
    _fault(
        "torch",
        "kvdsl/runtime/torch/settle.py",
        "reluctance = protection.mask.int() + (protection.mask & newest).int()",
        "reluctance = protection.mask.int()",
        *STEPS,
        "tests/runtime",
    ),
    _fault(
        "torch",
        "kvdsl/runtime/torch/settle.py",
        "due = (over >= trigger) & (trigger > 0)",
        "due = over >= trigger",
        "tests/runtime",
        *STEPS,
    ),
    _fault(
        "torch",
        "kvdsl/runtime/torch/settle.py",
        "protection.where((values != 0).any(1, keepdim=True))",
        "protection.where((values != 0).all(1, keepdim=True))",
        *STEPS,
        "tests/runtime",
    ),
    _fault(
        "torch",
        "kvdsl/runtime/torch/columns.py",
        "first = self.visible & (self._view.age == 0)",
        "first = self.visible & (self._view.age <= 1)",
        *STEPS,
    ),
    _fault(
        "torch",
        "kvdsl/runtime/torch/prompt.py",
        "view.random_key = (seed, layer, first_head + heads.start)",
        "view.random_key = (seed, layer, first_head)",
        "tests/runtime",
        *STEPS,
    ),
    _fault(
        "torch",
        "kvdsl/runtime/given.py",
        "return (given * self.prompt).floor().clamp(min=1)",
        "return (given * self.prompt).ceil().clamp(min=1)",
        "tests/runtime",
        "tests/hf",
    ),
    _fault(
        "torch",
        "kvdsl/runtime/torch/masked.py",
        '"max": lambda x, visible, dim: torch.where(visible, x, -torch.inf)',
        '"max": lambda x, visible, dim: torch.where(visible, x, 0.0)',
        *STEPS,
    ),
    # -- C++ ---------------------------------------------------------------------------------------------------------------
    _fault(
        "C++", "kvdsl/runtime/cpu/include/kvdsl/head.hpp", "nth_position(live - n + 1)", "nth_position(live - n)", *STEPS
    ),
    _fault(
        "C++",
        "kvdsl/runtime/cpu/include/kvdsl/head.hpp",
        "return held - (target < most ? target : most);",
        "return held - target;",
        *STEPS,
    ),
    _fault(
        "C++",
        "kvdsl/runtime/cpu/src/head.cpp",
        "((other == bar) & (at[i] > newer_than))",
        "((other == bar) & (at[i] >= newer_than))",
        *STEPS,
    ),
    _fault(
        "C++",
        "kvdsl/runtime/cpu/src/head.cpp",
        "const Grade own = at[i] == last ? above_all - 1 : grade(score[i]);",
        "const Grade own = grade(score[i]);",
        *STEPS,
        "tests/runtime",
    ),
    _fault(
        "C++",
        "kvdsl/runtime/cpu/src/decode.cpp",
        "tokens += args.real[row * args.tokens + t] != 0;",
        "tokens += 1;",
        *STEPS,
        "tests/hf",
    ),
    _fault(
        "C++",
        "kvdsl/runtime/cpu/src/decode.cpp",
        "    position[named[n]] = ~position[named[n]];\n    ++n;",
        "    ++n;",
        "tests/runtime",
        *STEPS,
    ),
    _fault("C++", "kvdsl/runtime/cpu/include/kvdsl/view.hpp", "window > 0 && seen > window ? window : seen", "seen", *STEPS),
    _fault("C++", "kvdsl/runtime/cpu/include/kvdsl/view.hpp", "place[behind] == place[of[i]] + 1 ?", "true ?", *STEPS),
    # -- Triton ------------------------------------------------------------------------------------------------------------
    _fault(
        "Triton",
        "kvdsl/runtime/gpu/attend.py",
        "visible = (pos >= 0) & (now - pos < window)",
        "visible = (pos >= 0) & (now - pos <= window)",
        "tests/triton",
    ),
    _fault(
        "Triton",
        "kvdsl/runtime/gpu/attend.py",
        "            v = tl.where(visible[:, None], v, 0.0)",
        "            v = v",
        "tests/triton",
    ),
    _fault(
        "Triton",
        "kvdsl/runtime/gpu/attend.py",
        "tl.where((split == 0) & (now < slots), now, 2**31 - 1)",
        "2**31 - 1",
        "tests/triton",
    ),
    _fault(
        "Triton",
        "kvdsl/runtime/gpu/observing.py",
        "tl.minimum(pos + (window - 1), end - 1)",
        "tl.minimum(pos + window, end - 1)",
        "tests/triton",
    ),
    _fault(
        "Triton",
        "kvdsl/runtime/gpu/observing.py",
        "attn, logit = attn * (1.0 / G), logit * (1.0 / G)",
        "attn, logit = attn * (1.0 / G), logit",
        "tests/triton",
    ),
    _fault(
        "Triton",
        "kvdsl/runtime/gpu/evicting.py",
        "middle = tl.where(tried == 0, low, tl.where(tried == 1, high - 1,",
        "middle = tl.where(tried == 0, low + 1, tl.where(tried == 1, high - 1,",
        "tests/triton",
    ),
    # -- where slots lie ---------------------------------------------------------------------------------------------------
    _fault(
        "state",
        "kvdsl/runtime/state/blocks.py",
        "self.table.masked_fill_(~self.used(position), FREE)",
        "pass",
        "tests/runtime",
    ),
    _fault("state", "kvdsl/runtime/state/blocks.py", "live.sum(-1).amax(1) + 1]", "live.sum(-1).amax(1)]", "tests/runtime"),
    _fault("state", "kvdsl/runtime/state/undo.py", "        state.filled = self.filled\n", "", "tests/runtime", "tests/hf"),
    _fault(
        "state", "kvdsl/runtime/state/undo.py", "ring[place, rows, :, :slots] = old", "pass", "tests/runtime", "tests/hf"
    ),
    _fault(
        "state",
        "kvdsl/runtime/state/order.py",
        "masked_fill_(leaving, FREE).clamp_(min=FREE)",
        "masked_fill_(leaving, FREE)",
        *STEPS,
        "tests/runtime",
    ),
    _fault(
        "state",
        "kvdsl/runtime/rope.py",
        "return x[..., ::2], x[..., 1::2]",
        "return x[..., 1::2], x[..., ::2]",
        *STEPS,
        "tests/runtime",
    ),
    # -- transformers ------------------------------------------------------------------------------------------------------
    _fault(
        "transformers",
        "kvdsl/runtime/hf/mask.py",
        "if length != UNCOUNTED and text.shape[-1] != length:",
        "if length != UNCOUNTED and text.shape[-1] > length:",
        "tests/hf",
    ),
    _fault(
        "transformers",
        "kvdsl/runtime/hf/attention.py",
        'if getattr(module, "is_causal", True) is False:',
        'if getattr(module, "is_causal", True) is None:',
        "tests/hf",
    ),
    _fault(
        "transformers",
        "kvdsl/runtime/hf/layer.py",
        "if asked in (UNTOLD, self.window):",
        "if asked is not None or self.window is None:",
        "tests/hf",
    ),
    _fault(
        "padding",
        "kvdsl/runtime/hf/mask.py",
        "None if mask.text is None else mask.text[:, -tokens:]",
        "None if mask.text is None else mask.text[:, :tokens]",
        "tests/hf",
    ),
    _fault(
        "padding",
        "kvdsl/runtime/hf/layer.py",
        "behind = positions.amax(1) + 1 < self.state.seen + new",
        "behind = positions.amax(1) < self.state.seen + new",
        "tests/hf",
    ),
    _fault(
        "padding",
        "kvdsl/runtime/hf/mask.py",
        "seen = causal.expand(tuple(size)) if text is None else causal & text[:, None, None]",
        "seen = causal.expand(tuple(size))",
        "tests/hf",
    ),
    _fault("guesses", "kvdsl/runtime/hf/speculation.py", "return sure if sure > 1 else 0", "return sure", "tests/hf"),
    _fault("beams", "kvdsl/runtime/hf/layer.py", "                    change(self._sync.text)\n", "", "tests/hf"),
    _fault(
        "beams",
        "kvdsl/runtime/state/slots.py",
        "setattr(self, name, with_rows(tensor, one.batch, rows))\n        self.layout.select_rows(self, rows)",
        "setattr(self, name, with_rows(tensor, one.batch, rows))",
        "tests/hf",
        "tests/runtime",
    ),
    _fault(
        "saving",
        "kvdsl/runtime/hf/saving.py",
        'abs(value - left["weights"][name]) <= 0.01 * abs(value) + 1e-6',
        'abs(value - left["weights"][name]) <= 1.0 + 0.01 * abs(value) + 1e-6',
        "tests/hf",
    ),
    # -- tools -------------------------------------------------------------------------------------------------------------
    _fault(
        "emit",
        "kvdsl/emit/render.py",
        "if name not in files and (folder / name).exists()]",
        "if False]",
        "tests/emit",
        "tests/cli",
    ),
    _fault("build", "kvdsl/build/store.py", 'and digest_of(folder / name) != sealed["sha256"]', "and False", "tests/build"),
    _fault(
        "build",
        "kvdsl/build/claim.py",
        "self.machine == _machine() and _started(self.pid) != self.started",
        "_started(self.pid) != self.started",
        "tests/build",
    ),
    _fault(
        "scenarios",
        "kvdsl/scenarios/run.py",
        "if expected.word.text not in refused.failure.message:",
        "if False:",
        "tests/scenarios",
    ),
    _fault(
        "command line",
        "kvdsl/cli/common.py",
        'one.severity == "error" or deny_warnings for one in found',
        'one.severity == "error" and not deny_warnings for one in found',
        "tests/cli",
    ),
    _fault(
        "command line",
        "kvdsl/cli/check.py",
        "told.setdefault((one.code, one.file, one.span.start, one.span.end, one.message), one)",
        "told.setdefault((one.code, one.file, one.message), one)",
        "tests/cli",
        "tests/diagnostics",
    ),
    _fault(
        "command line",
        "kvdsl/cli/test.py",
        'return any(all(map(holds, words.split(" and "))) for words in expression.split(" or "))',
        'return all(any(map(holds, words.split(" or "))) for words in expression.split(" and "))',
        "tests/cli",
    ),
    _fault("language server", "kvdsl/lsp/positions.py", '// (2 if self.codec == "utf-16-le" else 1)', "", "tests/lsp"),
    _fault(
        "language server",
        "kvdsl/lsp/navigation.py",
        "moved += len(to) - (span.end - span.start)",
        "moved += len(to)",
        "tests/lsp",
    ),
    _fault("language server", "kvdsl/lsp/navigation.py", "if len(errors) > sum(", "if len(errors) > 1 + sum(", "tests/lsp"),
    _fault(
        "vLLM",
        "kvdsl/integrations/vllm/refusals.py",
        "if spec.measures:",
        "if spec.measures and spec.supplied:",
        "tests/integrations",
    ),
    _fault(
        "vLLM",
        "kvdsl/integrations/vllm/refusals.py",
        "if processes > 1 and spec.agreement is not None:",
        "if processes > 2 and spec.agreement is not None:",
        "tests/integrations",
    ),
    _fault(
        "laboratory",
        "lab/kvdsl_lab/eval/perplexity.py",
        "target = ids[:, start + 1 : start + 1 + part.shape[1]]",
        "target = ids[:, start : start + part.shape[1]]",
        "tests/eval",
    ),
    _fault(
        "laboratory",
        "lab/kvdsl_lab/eval/usage.py",
        "bool((live < state.seen[:, None]).any())",
        "bool((live <= state.seen[:, None]).any())",
        "tests/eval",
    ),
]
