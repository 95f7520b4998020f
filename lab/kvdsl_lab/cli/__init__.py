"""The commands that kvdsl-lab adds; `kvdsl` finds them through the entry point `kvdsl.commands`."""

COMMANDS = {
    "calibrate": "Write the tensors that a policy reads, from a model and a text.",
    "trace": "Write a page that shows which tokens a policy kept at each step.",
    "bench": "Measure how fast a policy runs.",
    "eval": "Measure how much quality a policy loses.",
    "leaderboard": "Compare policies on many tasks, with tests of significance.",
    "recommend": "Find the policy that loses least on your prompts within a memory limit.",
    "search": "Search for new policies.",
    "reproduce": "Reproduce a paper's tables and figures.",
}
"""Name -> one line of help. The module of that name has the click command, called `command`."""
