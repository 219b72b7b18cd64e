"""Command `holdfast completion`: the script by which a shell completes commands and flags."""

from typing import Annotated, Literal

from cyclopts import Parameter


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="bash, zsh or fish")], /) -> int:
    """Print the script that completes `holdfast` in a shell.

    bash: holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast; zsh: into a file _holdfast in
    a folder of $fpath; fish: into ~/.config/fish/completions/holdfast.fish
    """
    from holdfast.cluster.commands.cli import app

    print(app.generate_completion(prog_name="holdfast", shell=shell))
    return 0
