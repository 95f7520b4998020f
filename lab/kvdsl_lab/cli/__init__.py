"""What the laboratory adds to the command line: `kvdsl` finds this module by the entry point `kvdsl.commands`."""

COMMANDS = {
    "calibrate": "Write the tensors that a policy reads, from a model and a text.",
    "trace": "Show which tokens a policy kept, step by step, as a page.",
    "bench": "Measure how fast a policy runs.",
    "eval": "Measure what a policy costs in quality.",
    "leaderboard": "Compare policies on many tasks, with differences told from chance.",
    "recommend": "Find the policy that loses least on your prompts, at the bytes that a request may take.",
    "search": "Search for policies that nobody has written.",
    "reproduce": "Measure a paper's tables and figures anew.",
}
"""Name -> one line of help. The module of that name beside this one holds the click command, called `command`."""
