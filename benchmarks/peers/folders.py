"""Cache folder of the benchmark: where environments, models and their conversions lie. Paths alone."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import quantized_models


@dataclass(frozen=True, slots=True)
class Folders:
    """Paths below one root."""

    root: Path = Path.home() / ".cache" / "holdfast" / "peers"

    def environment(self, name: str) -> Path:
        """A virtual environment."""
        return self.root / "environments" / name

    def python(self, environment: str) -> Path:
        return self.environment(environment) / "bin" / "python"

    def report(self, environment: str) -> Path:
        """What came of its installation."""
        return self.environment(environment) / "installation.json"

    def model(self, name: str) -> Path:
        """A model as Hugging Face stores it."""
        return self.root / "models" / name

    def served(self, name: str) -> Path:
        """What Holdfast is given: the folder of the model, or its GGUF file."""
        file = self.model(name) / quantized_models.FILE
        return file if quantized_models.is_gguf(name) else self.model(name)

    def reference(self, name: str) -> Path:
        """The model that outputs are compared with: of a quantized folder the one that was quantized."""
        return (
            self.model(quantized_models.source_of(name)[0]) if quantized_models.is_folder(name) else self.served(name)
        )

    def converted(self, name: str, form: str) -> Path:
        """The same model in a peer's own form."""
        return self.root / form / name

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"
