"""Reference of `holdfast verify`: a file of perplexities, another server, or a model that Hugging Face computes."""

import asyncio
import os
from pathlib import Path
from typing import Any, Final

from holdfast.worker.errors import ConfigurationError

_SCHEMES: Final = ("http://", "https://")


def reference_of(source: str | None) -> dict[str, Any] | None:
    """Perplexities by the text's name; None without a source.

    A server is asked without a key: that of the audited server is for it alone. Raises `ConfigurationError`.
    """
    if source is None:
        return None
    if source.startswith(_SCHEMES):
        return _of_server(source)
    path = Path(source)
    return _of_file(path) if path.is_file() and path.suffix != ".gguf" else _of_model(source)


def _of_file(path: Path) -> dict[str, Any]:
    from holdfast.cluster.verify.report import read_reference

    try:
        return read_reference(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--reference {path}: cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigurationError(f"--reference {path}: {error}") from None


def _of_server(url: str) -> dict[str, Any]:
    from holdfast.cluster.verify.audit import Audit
    from holdfast.cluster.verify.subject import Subject
    from holdfast.cluster.verify.transport import Budget, Transport

    audit = Audit(subject=Subject(model="", nonce=os.urandom(3).hex()), checks=["numbers"])

    async def run() -> None:
        transport = Transport(url, "", Budget())
        try:
            await audit.run(transport)
        finally:
            await transport.close()

    asyncio.run(run())
    if not any("nats_per_character" in entry for entry in audit.measured.values()):
        problem = next((one.about for one in audit.subject.findings), "it has no log-probabilities of prompts")
        raise ConfigurationError(f"--reference {url}: cannot be measured: {problem}")
    return audit.measured


def _of_model(model: str) -> dict[str, Any]:
    from holdfast.cluster.offline.text_likelihood import nats_of_texts
    from holdfast.cluster.verify.material import TEXTS

    nats = nats_of_texts(model, TEXTS)
    return {name: {"nats_per_character": nats[name] / len(text)} for name, text in TEXTS.items()}
