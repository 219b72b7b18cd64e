"""Generated files: written, or with `--check` only compared with what would be written. Nothing is generated here."""

import sys
from pathlib import Path


def keep(path: Path, fresh: str, source: str, module: str) -> None:
    """Raises SystemExit where `--check` is given and the file differs from its `source`; `module` mends it."""
    is_current = path.exists() and path.read_text(encoding="utf-8") == fresh
    if "--check" not in sys.argv:
        path.write_text(fresh, encoding="utf-8")
        print(f"{path.name} written, {'unchanged' if is_current else 'changed'}")
    elif is_current:
        print(f"{path.name} is current")
    else:
        raise SystemExit(f"{path.name} differs from the {source}; run `python -m {module}`")
