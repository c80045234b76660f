"""The command line: ``kernelgen`` and ``python -m kernelgen``. Commands load their module when they are run."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

import click

from kernelgen.errors import KernelgenError

# command -> (module:object, one line of help)
_COMMANDS = {
    "demo": ("kernelgen.cli.demo:demo", "Run attention, GEMM and MoE on real-sized input and check them."),
    "explain": ("kernelgen.cli.explain:explain", "Show which backend a call takes and why, for any target."),
    "prebuild": ("kernelgen.cli.explain:prebuild", "Compile the kernel of a call ahead of time."),
    "tune": ("kernelgen.cli.tune:tune", "Time every candidate on your shapes, and choose by it from then on."),
    "warmup": ("kernelgen.cli.warmup:warmup", "Load what a service needs, as a check before it starts."),
    "cache": ("kernelgen.cache.cli:cache", "List, check, prune, export and import compiled kernels."),
    "bench": ("kernelgen.cli.bench:bench", "Time kernels side by side with the installed peers."),
    "env": ("kernelgen.cli.env:env", "List settings, compilers and devices."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kernelgen")
@click.option("-v", "--verbose", is_flag=True, help="Log every decision, build and cache look-up.")
def cli(verbose: bool) -> None:
    """kernelgen: generated attention, GEMM and MoE kernels behind one dispatcher."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.DEBUG if verbose else logging.INFO)


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Errors of ours are one message and exit status 1, not a trace."""
    try:
        return cli(args=arguments)
    except (KernelgenError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
