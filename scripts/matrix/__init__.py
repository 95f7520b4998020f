"""kvdsl's cache in every class of transformers' AutoModelForCausalLM: `make matrix`, or `python -m scripts.matrix --help`.

Each class is made tiny (`sizes`), and called in every way that a model is called with a cache (`ways`): `generate`, forwards by name
and by position, through the inner model, in training, from threads, in chunks, with a ready-made mask. An untouched copy of the
model does the same with transformers' own DynamicCache. The outcome is one of

- `right`: the same (logits, losses and gradients within 0.01, relative); what had to be refused was refused;
- `refused: why`: kvdsl says that it does not serve this;
- `wrong: what`: something else, in silence;
- `failed: exception`: an error that is none of kvdsl's;
- `not tried: why`: there is nothing to compare with.

The report is one JSON object: `format_version`, `environment` (machine and versions) and `rows`, a list of `{class, config, type, name,
outcome, reason, seconds, ways}`, where `ways` has an outcome for each way, and `outcome` and `reason` are the worst of them. The exit
code is 1 if anything is wrong or failed.
"""
