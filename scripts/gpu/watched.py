"""What compute-sanitizer watches: a step and a prompt of every policy, or of those that are named, at one shape each."""

from __future__ import annotations

import sys
from dataclasses import replace

from scripts.gpu.right import numerics, prompted
from scripts.gpu.setting import Setting


def main() -> int:
    """0 whatever the numbers are: the sanitizer decides."""
    setting = Setting.of(toy=False, policies=sys.argv[1] if sys.argv[1:] else None, out=None)
    if setting is None:
        return 2
    sizes = replace(setting.sizes, checked=setting.sizes.checked[5:6], checked_prompts=setting.sizes.checked_prompts[1:2])
    small = replace(setting, sizes=sizes)
    for spec in small.specs():
        print(spec.stem, *numerics(spec, small), *prompted(spec, small), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
