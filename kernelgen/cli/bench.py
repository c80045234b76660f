"""``kernelgen bench``: time suites by the protocol, print the table, write the results file."""

from __future__ import annotations

from pathlib import Path

import click

from kernelgen.bench.suites import DEFAULT, SUITES

FIRST_CALL = "first-call"
NAMES = (*SUITES, FIRST_CALL)


@click.command()
@click.argument("suites", nargs=-1, metavar="[SUITE]...", type=click.Choice(NAMES))
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
              help="auto: the GPU if there is one.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write a results file (after every row).")
@click.option("--quick", is_flag=True, help="Few problems, 3 samples: a look, not a figure to decide on.")
@click.option("--only", default="", metavar="TEXT", help="Only problems whose line contains TEXT, e.g. 'd=128' or 'causal'.")
@click.option("--samples", type=click.IntRange(min=1), help="Samples per candidate (default: 9).")
@click.option("--seed", type=int, help="Seed of the random operands.")
@click.option("--commit", help="Commit to record where git cannot tell (a copy without its .git).")
@click.option("--markdown", is_flag=True, help="Print Markdown instead of tables.")
@click.pass_context
def bench(
    ctx: click.Context, suites: tuple[str, ...], device: str, path: Path | None, quick: bool, only: str, samples: int | None,
    seed: int | None, commit: str | None, markdown: bool,
) -> None:
    """Time SUITEs side by side with every installed peer, in one run.

    \b
    attention        prefill forward                     gemm        matrix products
    attention-short  prefill forward, short problems     route       router logits to experts
    decode           decode over a paged cache           moe         layers of experts
    decode-dense     decode over dense keys              rows        rmsnorm, silu_and_mul
    first-call       import, first call, host cost of a call, size of the wheel

    Default: attention, decode, gemm, rows. Numbers are checked first; what is wrong is not timed, and the exit status is 1 if
    that is kernelgen's own candidate.
    """
    from dataclasses import replace

    import torch
    from rich.console import Console

    from kernelgen.bench import first_call, machine, report, results, run
    from kernelgen.bench.protocol import Protocol

    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if where == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("got --device cuda, but torch finds no CUDA device; use --device cpu")
    protocol = Protocol.of(where, quick)
    protocol = replace(protocol, samples=samples or protocol.samples, seed=protocol.seed if seed is None else seed)
    names = suites or DEFAULT
    head, dirty = (commit, None) if commit else machine.commit()
    words = results.command_line(_words(suites, where, path, quick, only, samples, seed))
    done = results.Results(words, protocol.as_dict(), (), commit=head, dirty=dirty)

    def add(row: results.Row) -> None:
        nonlocal done
        done = replace(done, rows=(*done.rows, row))
        if path is not None:
            results.write(done, path)

    def say(text: str) -> None:
        click.echo(text, err=True)

    timed = [name for name in names if name != FIRST_CALL]
    if timed:
        for row in run.run(timed, protocol, quick=quick, only=only, say=say):
            add(row)
    if FIRST_CALL in names:
        for row in first_call.measure(where, rounds=2 if quick else 5, cold_rounds=1 if quick else 3):
            add(row)
            say(f"{row.problem}: {row.candidate}: {report.value(row) or row.note}")
    if markdown:
        click.echo(report.markdown(done))
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=220)
        console.print(report.headline(done), soft_wrap=True, highlight=False)
        for table in report.tables(done):
            console.print(table)
        mean = report.mean_ratio(done.rows)
        if mean is not None:
            console.print(f"geometric mean of kernelgen's ratio to the best peer: {mean:.3f}", highlight=False)
    failed = [row for row in done.rows if not row.peer and row.us is None and row.bytes is None]
    if failed or not done.rows:
        say(f"{len(failed)} of kernelgen's own rows were not timed" if done.rows else "no problem matches")
        ctx.exit(1)


def _words(
    suites: tuple[str, ...], device: str, path: Path | None, quick: bool, only: str, samples: int | None, seed: int | None,
) -> list[str]:
    """The command as a results file records it, with the device that was meant."""
    words = ["kernelgen", "bench", *suites, "--device", device]
    words += ["--quick"] if quick else []
    for name, value in (("--only", only), ("--samples", samples), ("--seed", seed), ("--json", path.name if path else None)):
        if value not in (None, ""):
            words += [name, str(value)]
    return words
