"""Generator of the parameter table in `docs/sampling.md`. `--check` only tells whether it is current.

python -m scripts.sampling_docs [--check]
"""

from collections.abc import Iterable
from pathlib import Path

from holdfast.worker.parameters import Parameter
from holdfast.worker.sampling_params import PARAMETERS
from scripts.generated_file import keep

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sampling.md"
HEADER = "| Parameter | Neutral | Limits | What it does |\n|---|---|---|---|\n"


def table(parameters: Iterable[Parameter]) -> str:
    """One row for each parameter."""
    return HEADER + "".join(
        f"| `{item.name}` | {_neutral(item)} | {item.limits} | {item.help} |\n".replace("|  |", "| |")
        for item in parameters
    )


def with_table(page: str, new: str) -> str:
    """The page with its table replaced."""
    before, header, rest = page.partition(HEADER)
    if not header:
        raise SystemExit(f"{PAGE}: has no table that begins with {HEADER.splitlines()[0]}")
    after = rest.partition("\n\n")[2]
    return f"{before}{new}\n{after}"


def _neutral(item: Parameter) -> str:
    default = item.default
    if item.metadata.neutral:
        return item.metadata.neutral
    if default is None:
        return "unset"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, int | float) else "none"


def main() -> None:
    fresh = with_table(PAGE.read_text(encoding="utf-8"), table(PARAMETERS.values()))
    keep(PAGE, fresh, "declarations", "scripts.sampling_docs")


if __name__ == "__main__":
    main()
