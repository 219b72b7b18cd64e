"""Chat templates that take the place of models' own: read and checked where a cluster or an engine is started.

A setting may name a file, which other machines do not have, so from here on it is the text.
"""

from pathlib import Path

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError

SETTING = "model.chat_template"


def template_text(template: str | Path, setting: str = "chat_template") -> str:
    """A chat template as it stands, or out of the file that it names. Raises `ConfigurationError` where it is neither,
    or does not compile.
    """
    from holdfast.router.text.chat import check_template

    text = template if isinstance(template, str) and is_template(template) else _read(Path(template), setting)
    check_template(text, f"{setting} = {_shown(template)}")
    return text


def with_template_text(model: ModelConfig) -> ModelConfig:
    """The settings of a model with the template itself, if they have one. Raises `ConfigurationError`."""
    if model.chat_template is None:
        return model
    return model.model_copy(update={"chat_template": template_text(model.chat_template, SETTING)})


def with_template_texts(config: HoldfastConfig) -> HoldfastConfig:
    """The same for each model of a cluster."""
    entries = tuple(one.model_copy(update={"model": with_template_text(one.model)}) for one in config.cluster.models)
    cluster = config.cluster.model_copy(update={"models": entries})
    return config.model_copy(update={"model": with_template_text(config.model), "cluster": cluster})


def is_template(text: str) -> bool:
    """Whether a text is a template itself, and not the path of a file with one."""
    return "{" in text or "\n" in text


def _read(path: Path, setting: str) -> str:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = "is neither a template nor a file with one"
        raise ConfigurationError(f"{setting} = {str(path)!r}: {reason} ({error})") from error
    if not is_template(text):
        raise ConfigurationError(f"{setting} = {str(path)!r}: the file has no template: there is no {{ in it")
    return text


def _shown(template: str | Path) -> str:
    shown = str(template)
    return repr(shown) if len(shown) <= 100 else f"{shown[:100]!r}..."
