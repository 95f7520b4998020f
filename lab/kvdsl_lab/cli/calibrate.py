"""`kvdsl calibrate`: compute the tensors that a policy reads from a model and a text."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli import completion
from kvdsl.cli.common import json_option
from kvdsl.cli.options import dtype_option, model_option
from kvdsl_lab.cli.measuring import Measured, text_option

if TYPE_CHECKING:
    from kvdsl_lab.calibrate.files import Files


def _chosen(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for text in values:
        name, equals, statistic = (part.strip() for part in text.partition("="))
        if not (name and equals and statistic):
            raise click.BadParameter(f"`{text}` is not of the form NAME=STATISTIC, for example `--tensor filter=q-filters`")
        chosen[name] = statistic
    return chosen


@click.command()
@click.argument("policy", metavar="POLICY", shell_complete=completion.policies)
@click.option("--tensor", "chosen", multiple=True, metavar="NAME=STATISTIC", callback=_chosen,
              help="Statistic of a tensor whose name does not give it; may be repeated.")  # fmt: skip
@model_option
@text_option
@click.option("--tokens", type=click.IntRange(8), default=8192, show_default=True, help="Tokens of the text to read.")
@click.option("--length", type=click.IntRange(8), default=1024, show_default=True, help="Tokens of a stretch.")
@click.option(
    "--sinks", type=click.IntRange(0), default=16, show_default=True, help="First tokens that a streaming head attends to."
)
@click.option("--recent", type=click.IntRange(1), default=64, show_default=True, help="Recent tokens that it attends to.")
@click.option("--channels", type=click.IntRange(1), default=16, show_default=True, help="Heavy channels of a KV head.")
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False),
              help="Folder for the files [default: where the policy reads them].")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's].")
@dtype_option
@json_option
def command(
    policy: str, chosen: dict[str, str], model: str | None, text: Path | None, tokens: int, length: int, sinks: int, recent: int,
    channels: int, out: Path | None, force: bool, threads: int | None, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Compute the tensors that a policy reads from a model's queries and keys over a text, under the full cache.

    A `tensor` line gives the file and the shape. The tensor's name gives the statistic, or --tensor does:

    \b
    q-filters        the direction along which a head's queries lie      filter, q_filter(s)
    query-mean       the mean query                                      query_mean, centre
    query-centres    each query head's mean query before it is rotated   centre over group
    query-roots      a root of the covariance of these queries           root over group, rank
    query-excess     by how much pairs of their dims are longer than     excess over group
                     those of the mean query
    key-pca          the first principal axis of a head's keys           axis, key_pca
    key-axes         the first --channels of them, dims by rank          basis, key_axes
    random-sketch    normal numbers, --channels for each dim             sketch
    heavy-channels   1 for the --channels dims that weigh most in        channels
                     products of queries and keys, else 0
    retrieval-heads  how much a head changes that sees --sinks and       retrieval, retrieval_heads
                     --recent tokens only: a rank from 0 to 1
    streaming-heads  1 less that                                         streaming, streaming_heads
    head-importance  the same change, over the mean of all heads         importance

    The last three read each stretch's first half twice and measure the second pass. They approximate the gates that DuoAttention trains
    and the scores that HeadKV derives from questions. All others read stretches spread evenly over the text. Vectors are rotated, as
    they are cached, except in `query-centres`, `query-roots` and `query-excess`.

    A file fits only models with the same layers, KV heads and dims. Use another text for calibration than for measurements.

    \b
    Examples:
      kvdsl calibrate duo.kv --model smollm2 --text book.txt --tokens 8192
      kvdsl calibrate mine.kv --tensor w=q-filters --model smollm2 -o numbers/
    """
    from kvdsl.compiler import analyse, find_policy

    found = analyse(find_policy(policy)).policy
    from kvdsl.cli.progress import progress
    from kvdsl_lab.calibrate import files, request, run
    from kvdsl_lab.calibrate.statistics import statistics

    wanted = request.wanted(found, chosen, statistics(sinks, recent, channels))
    if tokens < length:
        raise click.UsageError(
            f"--tokens {tokens} is less than a stretch of {length} tokens: give more, or a smaller --length"
        )
    if any(one.statistic.twice for one in wanted) and sinks + recent >= length // 2:
        raise click.UsageError(
            f"a streaming head would attend to {sinks} + {recent} tokens, from the second pass into the first ({length // 2} each): "
            f"give smaller --sinks and --recent, or a larger --length"
        )
    there = files.files_of(wanted, out)
    files.check_own(found, there)
    if not force:
        files.check_absent(there)
    begun, at = Measured(model, text, "auto", threads, dtype), time.perf_counter()
    ids = begun.stretches(length, max(1, tokens // length))
    asked = [one.statistic for one in wanted]
    with progress("calibrate", run.steps(ids, asked)) as tick:
        values = run.calibrate(begun.model, ids, asked, tick)
    facts = {
        "model": model or "reference", "text sha256": hashlib.sha256(begun.text.encode()).hexdigest()[:16],
        "tokens": ids.numel(), "length": length,
    }  # fmt: skip
    if any(statistic.twice for statistic in asked):
        facts |= {"sinks": sinks, "recent": recent}
    if any(statistic.name in ("heavy-channels", "key-axes", "random-sketch") for statistic in asked):
        facts |= {"channels": channels}
    files.write(there, values, {name: str(value) for name, value in facts.items()})
    seconds = round(time.perf_counter() - at, 1)
    result = {"policy": found.name, **facts, "seconds": seconds, "files": _as_data(there)}
    if as_json:
        begun.print_json(result)
        return
    for path, tensors in there.items():
        for one in tensors:
            click.echo(f"{path}: `{one.tensor.name}`, {one.statistic.doc}")
    where = (
        "`kvdsl compile` copies the numbers into the policy's package"
        if out is None
        else "the policy reads them from another folder"
    )
    click.echo(f"{ids.numel():,} tokens of the text in {seconds:g} s; {where}")


def _as_data(there: Files) -> list[dict[str, Any]]:
    return [
        {
            "path": str(path),
            "tensors": [
                {"name": one.tensor.name, "statistic": one.statistic.name, "axes": list(one.tensor.axes)} for one in tensors
            ],
        }
        for path, tensors in there.items()
    ]
