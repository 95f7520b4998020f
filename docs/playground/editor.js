// CodeMirror for policies, and to show what is generated of them.

import { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
import { cpp } from "@codemirror/lang-cpp";
import { python } from "@codemirror/lang-python";
import { bracketMatching, HighlightStyle, StreamLanguage, syntaxHighlighting } from "@codemirror/language";
import { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
import { EditorState } from "@codemirror/state";
import { drawSelection, EditorView, highlightActiveLine, hoverTooltip, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";

const colours = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.modifier, tags.controlKeyword], color: "var(--keyword)" },
  { tag: [tags.comment, tags.meta], color: "var(--comment)" },
  { tag: [tags.string, tags.docString], color: "var(--string)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--number)" },
  { tag: [tags.standard(tags.variableName), tags.function(tags.variableName), tags.typeName], color: "var(--builtin)" },
  { tag: [tags.definition(tags.variableName), tags.className], color: "var(--name)" },
]);

/** The rest of the line, or as much of it as a string of three quotes has. */
function within(stream, state) {
  while (!stream.eol()) {
    if (stream.match(state.quoted)) {
      state.quoted = "";
      break;
    }
    if (stream.next() === "\\") stream.next();
  }
  return "string";
}

/** Colours by the language's own words. */
function kv({ keywords, functions, inputs }) {
  const kinds = new Map([
    ...keywords.map((word) => [word, "keyword"]),
    ...inputs.map((word) => [word, "variableName.standard"]),
  ]);
  return StreamLanguage.define({
    name: "kv",
    startState: () => ({ naming: false, quoted: "" }),
    token(stream, state) {
      if (state.quoted) return within(stream, state);
      if (stream.eatSpace()) return null;
      if (stream.match(/#.*/)) return "comment";
      const quotes = stream.match(/"""|'''/);
      if (quotes) {
        state.quoted = quotes[0];
        return within(stream, state);
      }
      if (stream.match(/"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?/)) return "string";
      if (stream.match(/(?:\d+\.\d+|\.\d+|\d+(?:\.(?!\.))?)(?:[eE][+-]?\d+)?/)) return "number";
      const word = stream.match(/[A-Za-z_]\w*/);
      if (!word) {
        stream.next();
        return null;
      }
      const naming = state.naming;
      state.naming = /^(policy|extends|param|let|tensor|given)$/.test(word[0]);
      if (naming) return "variableName.definition";
      if (functions.includes(word[0]) && stream.peek() === "(") return "variableName.standard";
      const begins = /(^|\bwith)\s*(override\s+)?$/.test(stream.string.slice(0, stream.start));
      return inputs.includes(word[0]) && begins ? "keyword" : (kinds.get(word[0]) ?? "variableName");
    },
    languageData: { commentTokens: { line: "#" } },
  });
}

const looks = [syntaxHighlighting(colours), drawSelection(), EditorView.lineWrapping];

/**
 * The editor. Tab leaves it, so that no keyboard is caught; `changed` gets every new text, and `explained` the explanation that is asked
 * for with F1. `hover` finds what stands at a line and a character.
 */
export function policyEditor(parent, language, text, { changed, format, hover, explained }) {
  const at = async (view, position) => {
    const line = view.state.doc.lineAt(position);
    const found = await hover(line.number - 1, position - line.from);
    const place = ([number, character]) => view.state.doc.line(number + 1).from + character;
    return found ? { pos: place(found.from), end: place(found.to), text: found.text } : null;
  };
  const show = (view) => {
    at(view, view.state.selection.main.head).then((found) => explained(found ? formatted(found.text) : []));
    return true;
  };
  return new EditorView({
    parent,
    state: EditorState.create({
      doc: text,
      extensions: [
        ...looks,
        lineNumbers(),
        history(),
        bracketMatching(),
        highlightActiveLine(),
        lintGutter(),
        kv(language),
        hoverTooltip(async (view, position) => {
          const found = await at(view, position);
          return found && { ...found, above: true, create: () => ({ dom: box("explained", formatted(found.text)) }) };
        }),
        keymap.of([{ key: "F1", run: show }, { key: "Alt-Shift-f", run: () => (format(), true) }, ...defaultKeymap, ...historyKeymap, ...lintKeymap]),
        EditorView.contentAttributes.of({ "aria-label": "policy", "aria-describedby": "problems" }),
        EditorView.updateListener.of((update) => update.docChanged && changed(update.state.doc.toString())),
      ],
    }),
  });
}

/** The elements of a text in Markdown: paragraphs, code in lines, and code in a line. */
function formatted(text) {
  return text.split(/\n\n+/).map((part) => {
    const code = /^```\w*\n([^]*)\n```$/.exec(part);
    if (code) return box("", [code[1]], "pre");
    return box("", part.split("`").map((piece, index) => (index % 2 ? box("", [piece], "code") : piece)), "p");
  });
}

function box(className, parts, name = "div") {
  const made = Object.assign(document.createElement(name), { className });
  made.append(...parts);
  return made;
}

export function setText(view, text) {
  if (view.state.doc.toString() !== text) view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } });
}

/** Shows what the compiler found in the text. */
export function showProblems(view, found) {
  const end = view.state.doc.length;
  const marks = found.map((one) => ({
    from: Math.min(one.from, end),
    to: Math.min(Math.max(one.to, one.from), end),
    severity: one.severity,
    source: one.code,
    message: one.help ? `${one.message}\nhelp: ${one.help}` : one.message,
  }));
  view.dispatch(setDiagnostics(view.state, marks));
}

export function jump(view, to) {
  view.dispatch({ selection: { anchor: Math.min(to, view.state.doc.length) }, scrollIntoView: true });
  view.focus();
}

/** A text to read, in C++ or Python. */
export function codeView(parent, label, language) {
  return new EditorView({
    parent,
    state: EditorState.create({
      extensions: [
        ...looks,
        lineNumbers(),
        language === "cpp" ? cpp() : python(),
        EditorState.readOnly.of(true),
        EditorView.contentAttributes.of({ "aria-label": label, tabindex: "0" }),
      ],
    }),
  });
}
