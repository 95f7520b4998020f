"""Attacks on kvdsl, and a count of what survived: `make torture`, or `python -m scripts.torture --help`.

An attack is a function that tries one thing many times and counts how often kvdsl came through it: a right result, or an error
that says what to do; never a crash, a wrong number, a hang or a leak. The modules of this folder register theirs, and nothing else
has to know of them:

    from scripts.torture.registry import Counts, Progress, attack

    @attack("killed builds", "kill -9 at a random moment of a build; the next process uses what is left", count=200, quick=3)
    def killed_builds(seed: int, count: int, progress: Progress) -> Counts:
        counts = Counts()
        for number in range(count):
            with counts.trial(f"moment {number}"):  # an exception counts as not survived, and its text becomes a note
                ...
            progress()
        return counts

`count` is how often the full run tries it, `quick` how often `--quick` does; an attack that cannot run here raises `NotHere`, which
the report tells. The same seed tries the same things. An attack cleans up behind itself, uses folders of its own, and may use
two processor cores. The name of the module is the attack's group: `--only kills` runs a group, `--only "killed builds"` one attack.

The report is one JSON object: `format_version`, `environment` (machine and versions) and `attacks`, a list of `{group, attack,
what, seed, tried, survived, seconds, notes}`. With `--only`, what it has of other attacks stays. The exit code is 1 if
anything did not survive.
"""
