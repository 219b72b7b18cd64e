"""What a GPU measurement has found: rows of figures, printed, and written as JSON and Markdown to be committed."""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import MODELS

Row = dict[str, str | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Of one command. Rows of one table have the same keys."""

    title: str
    machine: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", *self.notes, *([""] if self.notes else [])]
        for table in _tables(self.rows):
            names = list(table[0])
            lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
            lines += ["| " + " | ".join(_shown(row[name]) for name in names) + " |" for row in table] + [""]
        return "\n".join(lines)


def _tables(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of equal keys that follow each other."""
    tables: list[list[Row]] = []
    for row in rows:
        if not tables or list(tables[-1][0]) != list(row):
            tables.append([])
        tables[-1].append(row)
    return tables


def _shown(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine(device: torch.device) -> str:
    """The device, and the versions that its kernels were made by."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"no GPU, {platform.machine()}"
    return f"{name}; torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}"


def parser_of(description: str | None, model: str = "8b") -> argparse.ArgumentParser:
    """The flags that all measurements share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default=model)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure")
    parser.add_argument("--json", type=Path, help="file to write the findings to")
    return parser


def tell(findings: Findings, file: Path | None) -> None:
    """Prints what was found, and writes it."""
    print(f"{findings.machine}\n\n{findings.markdown()}")
    if file is not None:
        file.write_text(json.dumps(asdict(findings), indent=2) + "\n")


def read(file: Path) -> Findings:
    """What `tell` has written."""
    content: dict[str, Any] = json.loads(file.read_text())
    lists = {name: tuple(content[name]) for name in ("rows", "notes")}
    return Findings(title=content["title"], machine=content["machine"], **lists)
