"""Generator of the tables in `docs/metrics.md`. `--check` only tells whether they are current.

python -m scripts.metrics_docs [--check]
"""

from pathlib import Path

from holdfast.router.metrics.catalogue import SECTIONS, Metric
from scripts.generated_file import keep

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEADER = "| name | type | labels | |\n|---|---|---|---|\n"


def table(metrics: tuple[Metric, ...]) -> str:
    """One row for each metric."""
    return HEADER + "".join(
        f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |\n".replace(
            "|  |", "| |"
        )
        for one in metrics
    )


def with_tables(page: str) -> str:
    """The page with the table below each section's title replaced. Raises SystemExit where a section has none."""
    for title, metrics in SECTIONS.items():
        before, found, rest = page.partition(f"\n### {title}\n\n{HEADER}")
        if not found:
            raise SystemExit(f"{PAGE}: section {title} has no table")
        after = rest[1:] if rest.startswith("\n") else rest.partition("\n\n")[2]  # the table may be empty yet
        page = f"{before}\n### {title}\n\n{table(metrics)}\n{after}"
    return page


def main() -> None:
    keep(PAGE, with_tables(PAGE.read_text(encoding="utf-8")), "catalogue", "scripts.metrics_docs")


if __name__ == "__main__":
    main()
