"""`kvdsl new`: create a policy to start from, with a test."""

from __future__ import annotations

from pathlib import Path

import click

from kvdsl.cli.common import json_option, print_json
from kvdsl.errors import KvdslError

POLICY = """\
kv 2

policy {name} {{
  \"\"\"
  Evicts the token with the lowest mean attention; the first and the most recent tokens stay.

  Say here what your policy does, and where it comes from.
  \"\"\"
  param budget = 256  # the tokens that each KV head keeps; 0.25 would be a quarter of the prompt
  param sinks  = 4
  param recent = budget / 4
  score mean(attn)   # the lowest is evicted first
  keep  first sinks  # protected tokens
  keep  last recent
}}
"""

TEST = """\
kv 2
import "{stem}.kv"

test "of the tokens between the first and the recent ones the least attended leaves" {{
  use {name}
  set budget = 4
  set sinks = 1
  set recent = 1
  prompt {{
    attend 1  # what each token gives to the tokens up to itself
    attend 0.5, 0.5
    attend 0.5, 0.25, 0.25
    attend 0.5, 0.125, 0.25, 0.125
  }}
  expect kept 0..3  # no more than the budget yet
  attend 0.25, 0, 0.5, 0, 0.25
  expect score 0.55, 0.21875, 0.333333, 0.0625, 0.25
  expect protected 0, 4
  expect evicted 3
}}
"""

NEXT = (
    ("kvdsl test {}", "the test passes; after a change it shows differences"),
    ("kvdsl explain {}", "what it keeps, its state and its costs"),
    ("kvdsl run {} --compare", "generate under it, next to the full cache"),
    ("kvdsl compile {}", "a Python package for models"),
)
"""Next commands with their purpose; `{}` stands for the file."""


@click.command()
@click.argument("name")
@json_option
def command(name: str, as_json: bool) -> None:
    """Create a policy to start from, with a test that passes.

    NAME is a file's name, with or without `.kv`, optionally in a folder: `my_policy` creates `my_policy.kv` with `policy MyPolicy`, and
    `my_policy_test.kv`. Existing files are never changed. To start from a shipped policy, use `kvdsl show`.

    \b
    Examples:
      kvdsl new mine
      kvdsl new policies/sparse_tail
    """
    from kvdsl.files import write_whole
    from kvdsl.sema.names import problem, stem_problem

    path = Path(name).with_suffix(".kv") if name.endswith(".kv") else Path(f"{name}.kv")
    policy = "".join(part[:1].upper() + part[1:] for part in path.stem.split("_"))
    wrong = stem_problem(path.stem) or problem(policy, "policy")
    if path.stem.endswith("_test"):
        wrong = f"`{path.name}` would be the name of a file of tests"
    if wrong is not None:
        raise KvdslError(f"{wrong}: choose another name, for example `kvdsl new my_policy`")
    texts = {path: POLICY, path.with_name(f"{path.stem}_test.kv"): TEST}
    for file in texts:
        if file.exists():
            raise KvdslError(f"`{file}` already exists: choose another name, or remove the file")
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_whole(file, text.format(name=policy, stem=path.stem))
        if not as_json:
            click.echo(f"wrote {file}")
    if as_json:
        print_json({"policy": policy, "files": [str(file) for file in texts]})
        return
    width = max(len(command) for command, _ in NEXT) + len(str(path)) - len("{}")
    lines = [f"{command.format(path):<{width}}  # {what}" for command, what in NEXT]
    click.echo("\nnext: " + "\n      ".join(lines))
