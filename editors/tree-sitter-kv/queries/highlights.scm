; Made by scripts/make_editors.py; do not edit.

(comment) @comment
(string) @string
(number) @number

["above" "across" "after" "as" "at" "attend" "budget" "by" "cap" "every" "expect" "extends" "first" "floor" "from" "given" "group" "import" "in" "input" "keep" "kv" "last" "layer" "layers" "let" "max_drop" "most" "next" "of" "over" "overflow" "override" "page" "pages" "param" "policy" "positions" "prefill" "prompt" "rest" "reused" "rope" "score" "select" "set" "shared" "sketch" "slack" "state" "storage" "tensor" "test" "times" "token" "top" "trigger" "use" "victims" "weight" "when" "where" "with"] @keyword
["and" "not" "or"] @keyword.operator
["!=" "%" "*" "**" "+" "-" ".." "<" "<=" "=" "==" ">" ">="] @operator
["(" ")" "[" "]" "{" "}"] @punctuation.bracket
["," "/"] @punctuation.delimiter
(signed (identifier) @constant.builtin)
(vector . (identifier) @keyword)
(expect . (identifier) @keyword)
(expect_error . (identifier) @keyword)

(policy name: (identifier) @type)
(extended name: (identifier) @type)
(extended extends: (identifier) @type)
(with name: (identifier) @type)
(with with: (identifier) @type)
(import (identifier) @type)
(use (identifier) @type)
(use_at (identifier) @type)
(param name: (identifier) @variable.parameter)
(tensor name: (identifier) @variable.parameter)
(input name: (identifier) @variable.parameter)
(input_file name: (identifier) @variable.parameter)
(input_span name: (identifier) @variable.parameter)
(given name: (identifier) @variable.parameter)
(supplied (identifier) @variable.parameter)
(tensor axis: (identifier) @constant.builtin)
(input_file axis: (identifier) @constant.builtin)
(member slot: (identifier) @variable)
(member value: (identifier) @variable)
(param kind: (identifier) @type.builtin)
(set (identifier) @variable.parameter)
(let name: (identifier) @variable . "=")
(let name: (identifier) @function (names))
(parameter name: (identifier) @variable.parameter)
(argument name: (identifier) @variable.parameter)
(expect_state (identifier) @variable)
(turn (identifier) @keyword)

((call function: (identifier) @function.builtin) (#match? @function.builtin "^(acos|ahead|count|enough|floor|fold|leverage|log|max|max_pool|mean|mean_pool|median|min|other|pairs|project|quantile|random|rank|sum|turn|where)$"))
((call function: (identifier) @function) (#not-match? @function "^(acos|ahead|count|enough|floor|fold|leverage|log|max|max_pool|mean|mean_pool|median|min|other|pairs|project|quantile|random|rank|sum|turn|where)$"))
((name) @variable.builtin (#match? @variable.builtin "^(age|attn|budget|everything|k|layer|layers|live|logit|position|prompt|q|query_head|query_position|scaling|seen|token|turn|turns|v)$"))
((name) @variable (#not-match? @variable "^(age|attn|budget|everything|k|layer|layers|live|logit|position|prompt|q|query_head|query_position|scaling|seen|token|turn|turns|v)$"))

(over (identifier) @constant.builtin)
(across (identifier) @constant.builtin)
(cap (identifier) @constant.builtin)
(group (identifier) @constant.builtin)
(input_span name: (identifier) (identifier) @constant.builtin)
(over_last (identifier) @constant.builtin)
(positions (identifier) @constant.builtin)
(prefill (identifier) @constant.builtin)
(rope (identifier) @constant.builtin)
(sketch (identifier) @constant.builtin)
(storage (identifier) @constant.builtin)
(victims (identifier) @constant.builtin)
(when (identifier) @constant.builtin)
