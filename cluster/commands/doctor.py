"""Command `holdfast doctor`: looks at this machine, and says what to do about each finding."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer

_MARKS = {"good": "[green]ok[/green]  ", "note": "[yellow]note[/yellow]", "bad": "[red]bad[/red] "}


@takes_settings("model", "parallel", "cache", "cluster", "security", without=("cluster.models",))
def doctor(
    *,
    quick: Annotated[
        bool,
        Parameter(
            group=ESSENTIALS, negative=(), help="skip the checks that load the model: memory plan and row invariance"
        ),
    ] = False,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Look at this machine and these settings, and say what to do about each finding.

    Versions, devices, memory, ports, the model's files and tokenizer, the memory plan, and whether a token's bits
    depend on its batch here. Takes the flags of `serve`. Exit code 0: nothing is bad.
    """
    from rich.console import Console

    from holdfast.cluster.config.config import load_config
    from holdfast.cluster.serve.examination import Level, examine

    console = Console(soft_wrap=True)
    worst = Level.GOOD
    for finding in examine(load_config(settings, config).config, quick=quick):
        worst = max(worst, finding.level)
        console.print(f"{_MARKS[finding.level.name.lower()]} ", end="")
        console.print(f"{finding.what}: {finding.found}", markup=False, highlight=False)
        if finding.advice:
            console.print(f"       {finding.advice}", markup=False, highlight=False, style="bold")
    return 1 if worst is Level.BAD else 0
