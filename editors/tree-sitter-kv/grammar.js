// The grammar of kvdsl for tree-sitter: rule by rule that of grammar/kv.lark, which says what each means. Its trees are the compiler's,
// rule for rule; tests/editors/test_tree_sitter.py compares them. A line's end is white space where no statement can end.

/// <reference types="tree-sitter-cli/dsl" />

const parts = (rule, separator) => seq(rule, repeat(seq(separator, rule)));
const lines = ($, rule) => choice(rule, seq(repeat1(seq(rule, repeat1($._end))), optional(rule)));
const open = ($) => seq(repeat($._end), "{", repeat($._end));

const OPERATORS = [
  ["or", 1], ["and", 2],
  ["<", 4], ["<=", 4], [">", 4], [">=", 4], ["==", 4], ["!=", 4],
  ["+", 5], ["-", 5], ["*", 6], ["/", 6], ["%", 6],
];
const [NOT, MINUS, POWER] = [3, 7, 8];

module.exports = grammar({
  name: "kv",
  word: ($) => $.identifier,
  extras: ($) => [/[ \t\r\n]/, $.comment],

  rules: {
    start: ($) => seq(repeat($._end), optional(lines($, $._top))),

    _top: ($) => choice($.edition, $.import, $.let, $.policy, $.with, $.extended, $.test),
    edition: ($) => seq("kv", $.number),
    import: ($) => seq("import", choice($.identifier, $.string)),
    policy: ($) => seq("policy", field("name", $.identifier), open($), optional($.body), "}"),
    extended: ($) => seq("policy", field("name", $.identifier), "extends", field("extends", $.identifier), open($), optional($.body), "}"),
    with: ($) => seq(
      "policy", field("name", $.identifier), "=", field("with", $.identifier), "with",
      choice($.clauses, seq(open($), optional($.body), "}")),
    ),
    clauses: ($) => parts($._plain, ","),
    body: ($) => choice(seq($.docstring, repeat($._end), optional(lines($, $._statement))), lines($, $._statement)),
    docstring: ($) => $.string,

    _statement: ($) => choice($._plain, $.override),
    override: ($) => seq("override", $._plain),
    _plain: ($) => choice(
      $.param, $.let, $.input, $.input_file, $.input_span, $.tensor, $.given, $.budget, $.score, $.keep_first, $.keep_last, $.keep_top, $.keep_where, $.keep_nothing, $.victims, $.trigger, $.slack,
      $.max_drop, $.cap, $.select, $.sketch, $.pages, $.layers, $.when, $.group, $.positions, $.storage, $.rope, $.prefill,
    ),

    // names
    param: ($) => seq(
      "param", field("name", $.identifier), optional(field("kind", $.identifier)), "=", $._expression, optional(seq("in", $.range)),
    ),
    let: ($) => seq("let", field("name", $.identifier), optional($.names), "=", $._expression),
    names: ($) => seq("(", optional(parts($.parameter, ",")), ")"),
    parameter: ($) => seq(field("name", $.identifier), optional(seq("=", $._expression))),
    input: ($) => seq("input", field("name", $.identifier), optional(seq("=", $._expression))),
    input_file: ($) => seq(
      "input", field("name", $.identifier), "[", parts(field("axis", $.identifier), ","), "]", "from", $.string,
    ),
    input_span: ($) => seq("input", field("name", $.identifier), "from", $.identifier),
    tensor: ($) => seq(
      "tensor", field("name", $.identifier), "[", parts(field("axis", $.identifier), ","), "]", "from", $.string,
    ),
    given: ($) => seq("given", field("name", $.identifier), optional(seq("=", $._expression))),

    // what to evict
    budget: ($) => seq("budget", $._expression, optional($.at_most), repeat($.across)),
    at_most: ($) => seq("at", "most", $._expression),
    across: ($) => seq("across", $.identifier, optional(seq("by", $._expression)), optional(seq("floor", $._expression))),
    score: ($) => seq("score", $._expression),
    keep_first: ($) => seq("keep", "first", $._expression),
    keep_last: ($) => seq("keep", "last", $._expression),
    keep_top: ($) => seq("keep", "top", $._expression, "by", $._expression),
    keep_where: ($) => seq("keep", "where", $._expression),
    keep_nothing: ($) => "keep",
    victims: ($) => seq("victims", "shared", "by", $.identifier),

    // when and how many
    trigger: ($) => seq("trigger", "overflow", ">=", $._expression),
    slack: ($) => seq("slack", $._expression),
    max_drop: ($) => seq("max_drop", $._expression),
    cap: ($) => seq("cap", $.identifier),

    // what to attend to
    select: ($) => seq(
      "select", choice(seq("top", $._expression, "by", $._expression), seq("where", $._expression)),
      optional(seq("weight", $._expression)),
      optional(choice($.within, $.choosing, $.reused)),
    ),
    within: ($) => seq("in", "layers", $.range),
    choosing: ($) => seq("from", "layers", "(", parts($._expression, ","), ")"),
    reused: ($) => seq("in", "layers", parts($._expression, ","), "reused", "above"),
    sketch: ($) => seq("sketch", "top", $._expression, $.identifier, "by", $._expression, "every", $._expression, $.identifier),
    pages: ($) => seq("pages", $._expression, optional(seq("after", $._expression))),

    // where, and how it is stored
    layers: ($) => seq("layers", $.range),
    when: ($) => seq("when", $.identifier, optional(seq("every", $._expression))),
    group: ($) => seq("group", $.identifier),
    positions: ($) => seq("positions", $.identifier),
    storage: ($) => seq("storage", $.identifier, optional($._expression)),
    rope: ($) => seq("rope", $.identifier),
    prefill: ($) => seq("prefill", $.identifier, optional(seq("of", $._expression))),
    range: ($) => seq(optional($._expression), "..", optional($._expression)),

    // expressions
    _expression: ($) => choice($.binary, $.unary, $.number, alias($.identifier, $.name), $.call, $.member, seq("(", $._expression, ")")),
    binary: ($) => choice(
      ...OPERATORS.map(([operator, strength]) => prec.left(strength, seq($._expression, operator, $._expression))),
      prec.right(POWER, seq($._expression, "**", $._expression)),
    ),
    unary: ($) => choice(prec(NOT, seq("not", $._expression)), prec(MINUS, seq("-", $._expression))),
    call: ($) => seq(field("function", $.identifier), "(", optional(parts($.argument, ",")), ")"),
    member: ($) => seq(field("slot", $.identifier), ".", choice(field("value", $.identifier), seq("(", $._expression, ")"))),
    argument: ($) => seq(
      optional(seq(field("name", $.identifier), "=")), $._expression,
      optional(choice($.over, $.over_last, $.over_next, $.over_after)), optional($.only), optional($.by),
    ),
    over: ($) => seq("over", $.identifier, optional(seq("as", field("slot", $.identifier)))),
    over_after: ($) => seq("over", $.identifier, "after", $._expression),
    only: ($) => seq("where", $._expression),
    by: ($) => seq("by", $._expression),
    over_last: ($) => seq("over", "last", $._expression, $.identifier),
    over_next: () => seq("over", "next", "page"),

    // tests
    test: ($) => seq("test", $.string, open($), optional(lines($, $._step)), "}"),
    _step: ($) => choice($.use, $.use_at, $.set, $.prompt, $._token, $.turn, $.expect, $.expect_error, $.expect_state),
    use: ($) => seq("use", $.identifier),
    use_at: ($) => seq("use", $.identifier, "at", "layer", $.number, "of", $.number),
    set: ($) => seq("set", $.identifier, "=", $.signed),
    prompt: ($) => seq("prompt", open($), optional(lines($, $._token)), "}"),
    _token: ($) => choice($.attend, $.token, $.times),
    times: ($) => seq($.number, "times", choice($.attend, $.token)),
    attend: ($) => seq("attend", $.rows, repeat(choice($.vector, $.supplied))),
    token: ($) => seq("token", repeat1(choice($.vector, $.supplied))),
    turn: ($) => $.identifier,
    vector: ($) => seq($.identifier, parts($.heads, "/")),
    supplied: ($) => seq("given", $.identifier, $.rows),
    heads: ($) => parts($.row, "and"),

    expect: ($) => seq("expect", $.identifier, $.rows),
    expect_error: ($) => seq("expect", $.identifier, $.string),
    expect_state: ($) => seq("expect", "state", $.identifier, $.rows),

    rows: ($) => parts($.row, "/"),
    row: ($) => parts(choice($.signed, $.span, $.rest), ","),
    rest: ($) => seq("rest", $.signed),
    span: ($) => seq($.number, "..", $.number),
    signed: ($) => seq(optional("-"), choice($.number, $.identifier)),

    // terminals
    identifier: ($) => /[A-Za-z_][A-Za-z0-9_]*/,
    number: ($) => choice(
      /[0-9]+\.[0-9]+([eE][+-]?[0-9]+)?/,
      /\.[0-9]+([eE][+-]?[0-9]+)?/,
      /[0-9]+[eE][+-]?[0-9]+/,
      seq(/[0-9]+/, optional(token.immediate(/\.([eE][+-]?[0-9]+)?/))), // 4. but not the 4. of 4..9
    ),
    string: ($) => choice(
      /"""([^"\\]|\\(.|\n)|"{1,2}([^"\\]|\\(.|\n)))*"""/,
      /'''([^'\\]|\\(.|\n)|'{1,2}([^'\\]|\\(.|\n)))*'''/,
      /"([^"\\\n]|\\(.|\n))*"/,
      /'([^'\\\n]|\\(.|\n))*'/,
    ),
    comment: ($) => /#[^\n]*/,
    _end: ($) => /[;\n]/,
  },
});
