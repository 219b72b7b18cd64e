"""Stand-ins for what vLLM's tests import of vLLM: its server fixture, which here is the one that runs, and names.

Tests of vLLM's own classes are not run, so that a name needs no meaning; only what tests of a server use has one.
"""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import MagicMock
from urllib.parse import urlsplit

WAIT_S: Final = 100.0


class Platform:
    """Neither of the accelerators that tests ask about."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_more: False


class Module(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012  # of a package without files

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (Exception,), {}) if name.endswith("Error") else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Finder:
    """Finds each module of vLLM: they are all the same."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def server_class(url: str) -> type:
    """vLLM's `RemoteOpenAIServer`, for a server that runs: its arguments are not heeded."""

    class RemoteOpenAIServer:
        url_root = url
        host, port = urlsplit(url).hostname, urlsplit(url).port

        def __init__(self, *_arguments: object, **_more: object) -> None:
            """It runs already."""

        def __enter__(self) -> "RemoteOpenAIServer":
            return self

        def __exit__(self, *_raised: object) -> None:
            """It runs on."""

        def url_for(self, *parts: str) -> str:
            return "/".join([url, *parts])

        def _client(self, kind: str, base: str, given: dict[str, Any]) -> Any:
            import anthropic
            import openai

            made = getattr(anthropic if "Anthropic" in kind else openai, kind)
            return made(**{"base_url": base, "api_key": "EMPTY", "max_retries": 0, "timeout": WAIT_S, **given})

        def get_client(self, **given: Any) -> Any:
            return self._client("OpenAI", f"{url}/v1", given)

        def get_async_client(self, **given: Any) -> Any:
            return self._client("AsyncOpenAI", f"{url}/v1", given)

        def get_client_anthropic(self, **given: Any) -> Any:
            return self._client("Anthropic", url, given)

        def get_async_client_anthropic(self, **given: Any) -> Any:
            return self._client("AsyncAnthropic", url, given)

    return RemoteOpenAIServer


def install(root: Path, url: str, tokenizer: str) -> None:
    """Puts the stand-ins where tests below `root`, vLLM's source, import them from."""
    sys.meta_path.insert(0, Finder())
    import vllm.config  # type: ignore[import-not-found]
    import vllm.platforms  # type: ignore[import-not-found]
    import vllm.tokenizers  # type: ignore[import-not-found]

    vllm.platforms.current_platform = Platform()
    vllm.tokenizers.get_tokenizer = lambda *_names, **_more: _tokenizer(tokenizer)
    vllm.config.ModelConfig = lambda **_more: _ModelConfig(tokenizer)
    tests, utils = ModuleType("tests"), Module("tests.utils")
    tests.__path__ = [str(root / "tests")]
    vars(utils).update(RemoteOpenAIServer=server_class(url), ROCM_EXTRA_ARGS=[], VLLM_PATH=root)
    sys.modules.update({"tests": tests, "tests.utils": utils})


class _ModelConfig:
    """What tests ask of the model's config."""

    def __init__(self, folder: str) -> None:
        self._config = json.loads((Path(folder) / "config.json").read_text())

    def get_vocab_size(self) -> int:
        return int(self._config["vocab_size"])


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
