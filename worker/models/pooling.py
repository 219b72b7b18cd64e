"""Pooling models: the meaning of a checkpoint's files for a prompt's states, and the arithmetic behind the last layer.

The source is `modules.json` in a folder of sentence-transformers, the head of a classification model, or, where the
files have neither, the settings `model.runner`, `model.convert` and `model.pooling_type`. All of it is computed in
float64, row by row and in one order, and rounded once: a row's bits do not depend on its neighbours, and no instruction
class adds in another order.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.encoder import Encoder, HeadPart
from holdfast.worker.models.encoders import WAY_OUT, check_encoder, encoder_of, why_not_pooled
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.pooled_layers import FUNCTIONS, Dense, LayerNorm, PooledLayer, Row, numbers_in, numbers_of
from holdfast.worker.models.text_model import CLASSIFIERS, holds_text_model, is_without_head, served_config
from holdfast.worker.models.weight_files import weight_files
from holdfast.worker.models.weights import read_json
from holdfast.worker.pooling import (
    NOT_FINITE,
    PoolingActivation,
    PoolingFacts,
    PoolingKind,
    PoolingParams,
    PoolingTask,
    PoolShare,
)
from holdfast.worker.step_plan import StepPlan

_MODES: Final = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
_SHORT_MODES: Final = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}

_QWEN3_RERANKER: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Prompt of Qwen3-Reranker, by its model card."""

_FUNCTIONS: Final = {"Identity": "none", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Activations by the names of torch's modules."""


class Pooler:
    """Pooling of one model, on its leading rank."""

    def __init__(self, facts: PoolingFacts, layers: Sequence[PooledLayer] = ()) -> None:
        self.facts = facts
        self._layers = layers

    def pooled(self, plan: StepPlan, states: NDArray[np.float32] | None) -> dict[int, bytes]:
        """Sums and results of a step by sequence id, of the states of its pooled rows [rows, hidden]; None: it has
        none. Of a sequence of which no row was pooled so far there is nothing.
        """
        found: dict[int, bytes] = {}
        ended: list[tuple[int, PoolShare, Row]] = []
        row = 0
        for share in plan.others:
            if (pool := share.pool) is None:
                continue
            num_rows = pool.end_row - pool.first_row
            if not (num_rows or pool.before):
                continue
            total = _total(pool.before, None if states is None else states[row : row + num_rows])
            row += num_rows
            if not np.isfinite(total).all():
                found[share.sequence_id] = NOT_FINITE
            elif pool.is_last:
                ended.append((share.sequence_id, pool, total))
            else:
                found[share.sequence_id] = total.tobytes()
        for sequence_id, pool, total in ended:
            found[sequence_id] = self._result(total / pool.num_rows, pool.params).astype("<f4").tobytes()
        return found

    def _result(self, row: Row, params: PoolingParams) -> Row:
        for layer in self._layers:
            row = layer.of(row)
        row = row[: params.dimensions]
        return row if params.use_activation is False else activated(self.activation_of(params), row)

    def activation_of(self, params: PoolingParams) -> PoolingActivation:
        """Activation for a request, which may have vectors normalized that the model leaves as they are."""
        if params.use_activation and self.facts.task is PoolingTask.EMBED:
            return PoolingActivation.NORMALIZE
        return self.facts.activation


def _total(before: bytes, states: NDArray[np.float32] | None) -> Row:
    """The sum of rows in their order, after those of the steps before."""
    if states is None or not len(states):
        return np.frombuffer(before)
    rows = states.astype(np.float64)
    if before:
        rows = np.concatenate((np.frombuffer(before)[None], rows))
    total: Row = np.add.reduce(rows, axis=0)
    return total


def activated(activation: PoolingActivation, row: Row) -> Row:
    """The last step, for one row."""
    if activation is PoolingActivation.NORMALIZE:
        length = math.sqrt(np.add.accumulate(row * row)[-1])
        return row / max(length, 1e-12)
    if activation is PoolingActivation.SIGMOID:
        return np.array([_sigmoid(value) for value in row.tolist()])
    if activation is PoolingActivation.SOFTMAX:
        masses = [math.exp(value) for value in (row - row.max()).tolist()]
        return np.array(masses) / math.fsum(masses)
    return row


def _sigmoid(value: float) -> float:
    small = math.exp(-abs(value))
    return (1.0 if value >= 0 else small) / (1.0 + small)


# --- what the files say ---


def load_pooler(config: ModelConfig, folder: Path) -> Pooler | None:
    """The pooling of the model in `folder`; None: it generates text.

    Raises `ConfigurationError` and `UnsupportedModelError` for a kind of pooling that is not supported.
    """
    raw = {**read_json(folder / "config.json"), **config.hf_overrides}
    task = _task(config, raw, folder)
    if task is None:
        return None
    reader = _FolderReader(config, raw, folder)
    return reader.embedder() if task is PoolingTask.EMBED else reader.classifier()


def check_pooled(config: ModelConfig, folder: Path) -> None:
    """Raises `UnsupportedModelError` for a pooling model whose states are not computed here, before it is loaded."""
    raw = {**read_json(folder / "config.json"), **config.hf_overrides}
    model_type = str(served_config(raw, folder).get("model_type"))
    if encoder_of(model_type) is not None:
        check_encoder(raw, model_type, config.runner)
    elif model_type not in FAMILIES and _task(config, raw, folder) is not None:
        raise UnsupportedModelError(model_type, why_not_pooled(model_type), WAY_OUT)


def max_tokens_of(folder: Path) -> int | None:
    """The longest text that a folder of sentence-transformers was made for; None: it says nothing."""
    found = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    return found if type(found) is int and found > 0 else None


def _task(config: ModelConfig, raw: Mapping[str, Any], folder: Path) -> PoolingTask | None:
    if config.runner == "generate" or (config.runner == "auto" and holds_text_model(raw)):
        return None
    if config.convert in ("embed", "classify"):
        return PoolingTask(config.convert)
    architecture = str((raw.get("architectures") or [""])[0])
    if architecture.endswith(CLASSIFIERS) or "classifier_from_token" in raw:
        return PoolingTask.CLASSIFY
    is_encoder = encoder_of(str(raw.get("model_type"))) is not None
    if config.runner == "pooling" or (folder / "modules.json").is_file() or is_without_head(raw) or is_encoder:
        return PoolingTask.EMBED
    return None


class _FolderReader:
    """Reads the files of one pooling model."""

    def __init__(self, config: ModelConfig, raw: Mapping[str, Any], folder: Path) -> None:
        self._config = config
        self._raw = raw
        self._folder = folder
        self._type = str(raw.get("model_type"))
        self._encoder = encoder_of(self._type)

    def embedder(self) -> Pooler:
        """A model of vectors. Without files of sentence-transformers, it pools the last token, or an encoder's first
        one, and normalizes, as vLLM does.
        """
        kind = PoolingKind.LAST if self._encoder is None else PoolingKind.CLS
        activation, layers = PoolingActivation.NORMALIZE, list[Dense]()
        if modules := self._modules():
            activation = PoolingActivation.NONE
            for name, path in modules:
                if name == "Pooling":
                    kind = self._kind(path)
                elif name == "Dense":
                    layers.append(self._dense(path))
                elif name == "Normalize":
                    activation = PoolingActivation.NORMALIZE
                elif name != "Transformer":
                    raise self._refused(f"modules.json has a module {name}")
        dimensions = self._raw.get("matryoshka_dimensions")
        facts = PoolingFacts(
            task=PoolingTask.EMBED,
            kind=self._chosen(kind),
            activation=activation,
            num_outputs=layers[-1].weight.shape[1] if layers else int(self._raw["hidden_size"]),
            is_matryoshka=bool(self._raw.get("is_matryoshka") or dimensions),
            dimensions=tuple(dimensions) if isinstance(dimensions, list) else (),
            prompt=self._default_prompt(),
            is_whole=self._encoder is not None,
        )
        return Pooler(facts, layers)

    def classifier(self) -> Pooler:
        """A model of scores: of a head for labels, or of two tokens of a causal language model."""
        if self._encoder is not None:
            layers = [self._part(self._encoder, part) for part in self._encoder.head(self._raw)]
            return self._of_labels(
                PoolingKind(self._encoder.kind(self._raw)), layers, self._config.score_template or ""
            )
        tokens = self._raw.get("classifier_from_token")
        weight = self._numbers("score.weight") if tokens is None else self._of_tokens(tokens)
        if weight is None:
            reason = "its files have no score.weight, and config.json no classifier_from_token"
            raise self._refused(reason, "Set hf_overrides classifier_from_token to two tokens, or convert to embed")
        head = Dense(np.ascontiguousarray(weight.T), None, "none")
        return self._of_labels(PoolingKind.LAST, [head], self._pair_template(tokens))

    def _of_labels(self, kind: PoolingKind, layers: Sequence[PooledLayer], template: str) -> Pooler:
        """A model of scores, of the outputs of the last layer."""
        num_labels = layers[-1].weight.shape[-1]
        names = self._raw.get("id2label") or {}
        labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels))
        facts = PoolingFacts(
            task=PoolingTask.CLASSIFY,
            kind=self._chosen(kind),
            activation=self._score_activation(num_labels),
            num_outputs=num_labels,
            labels=labels,
            pair_template=template,
            is_whole=self._encoder is not None,
        )
        return Pooler(facts, layers)

    def _part(self, encoder: Encoder, part: HeadPart) -> PooledLayer:
        """A layer of an encoder's head."""
        base = FAMILIES[self._type].base
        weight, bias = (
            next((found for prefix in (base, "") if (found := self._numbers(f"{prefix}{name}")) is not None), None)
            for name in (f"{part.module}.weight", f"{part.module}.bias")
        )
        if weight is None:
            raise self._refused(f"its files have no {part.module}.weight", "Set convert to embed")
        if part.eps is not None:
            return LayerNorm(weight, bias, part.eps)
        if part.function not in FUNCTIONS:
            raise self._refused(f"its classifier_activation is {part.function}")
        return Dense(np.ascontiguousarray(weight.T), bias, part.function)

    def _pair_template(self, tokens: Any) -> str:
        if self._config.score_template is not None:
            return self._config.score_template
        is_qwen3 = self._raw.get("is_original_qwen3_reranker") or (self._type == "qwen3" and tokens == ["no", "yes"])
        return _QWEN3_RERANKER if is_qwen3 else ""

    def _score_activation(self, num_labels: int) -> PoolingActivation:
        """Activation as sentence-transformers and vLLM choose it: a sigmoid of one label, or of several that exclude
        nothing.
        """
        own = self._raw.get("sentence_transformers")
        named = self._raw.get("sbert_ce_default_activation_function")
        named = own.get("activation_fn", named) if isinstance(own, Mapping) else named
        problem = self._raw.get("problem_type")
        if named is not None:
            return PoolingActivation(self._function(str(named), ("none", "sigmoid", "softmax")))
        if problem == "regression":
            return PoolingActivation.NONE
        is_one = num_labels == 1 or problem == "multi_label_classification"
        return PoolingActivation.SIGMOID if is_one else PoolingActivation.SOFTMAX

    def _chosen(self, kind: PoolingKind) -> PoolingKind:
        return kind if self._config.pooling_type == "auto" else PoolingKind(self._config.pooling_type)

    def _modules(self) -> list[tuple[str, Path]]:
        """Names and folders of sentence-transformers' modules, in order; none where it is no folder of its."""
        if not (self._folder / "modules.json").is_file():
            return []
        try:
            found = json.loads((self._folder / "modules.json").read_text(encoding="utf-8"))
            return [(str(one["type"]).rpartition(".")[2], self._inside(str(one["path"]))) for one in found]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{self._folder}/modules.json cannot be read: {error}") from error

    def _inside(self, path: str) -> Path:
        found = (self._folder / path).absolute()
        if ".." in Path(path).parts or not found.is_relative_to(self._folder.absolute()):
            raise ConfigurationError(f"{self._folder}/modules.json: path {path!r} leads out of the folder")
        return found

    def _kind(self, path: Path) -> PoolingKind:
        entries = read_json(path / "config.json")
        modes = [name for name, value in entries.items() if name.startswith("pooling_mode_") and value is True]
        kinds = [_MODES.get(name) for name in modes]
        if (short := entries.get("pooling_mode")) is not None:
            modes, kinds = [str(short)], [_SHORT_MODES.get(str(short))]
        if len(kinds) != 1 or kinds[0] is None:
            raise self._refused(f"{path.name}/config.json has {', '.join(modes) or 'no pooling mode'}")
        if entries.get("include_prompt") is False:
            raise self._refused(f"{path.name}/config.json leaves prompts out of the mean (include_prompt)")
        return kinds[0]

    def _dense(self, path: Path) -> Dense:
        entries = read_json(path / "config.json")
        file = path / "model.safetensors"
        if not file.is_file():
            raise self._refused(f"the module {path.name} has no model.safetensors")
        weight = numbers_in(file, "linear.weight")
        if weight is None:
            raise self._refused(f"{path.name}/model.safetensors has no linear.weight")
        function = self._function(str(entries.get("activation_function", "Tanh")), ("none", "tanh"))
        return Dense(np.ascontiguousarray(weight.T), numbers_in(file, "linear.bias"), function)

    def _function(self, name: str, known: Sequence[str]) -> str:
        found = _FUNCTIONS.get(name.rpartition(".")[2].removesuffix("()"))
        if found is None or found not in known:
            raise self._refused(f"its activation is {name}")
        return found

    def _default_prompt(self) -> str:
        entries = read_json(self._folder / "config_sentence_transformers.json")
        name, prompts = entries.get("default_prompt_name"), entries.get("prompts")
        if name is None:
            return ""
        if not isinstance(prompts, Mapping) or not isinstance(prompts.get(name), str):
            raise ConfigurationError(
                f"{self._folder}/config_sentence_transformers.json: default_prompt_name = {name!r}: none of its prompts"
            )
        return str(prompts[name])

    def _of_tokens(self, tokens: Any) -> Row:
        """The difference of two tokens' logits: how much likelier the second one is than the first."""
        if not (isinstance(tokens, list) and len(tokens) == 2):
            raise ConfigurationError(f"model.hf_overrides: classifier_from_token = {tokens!r}: must be two tokens")
        vocabulary = read_json(self._folder / "tokenizer.json").get("model", {}).get("vocab", {})
        if missing := [token for token in tokens if token not in vocabulary]:
            raise ConfigurationError(
                f"model.hf_overrides: classifier_from_token: {missing[0]!r} is no token of the model"
            )
        for name in ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight"):
            if (rows := self._numbers(name, [vocabulary[token] for token in tokens])) is not None:
                return rows[1:] - rows[:1]
        raise self._refused("its files have no head")

    def _numbers(self, name: str, rows: Sequence[int] | None = None) -> Row | None:
        return numbers_of(weight_files(self._folder), name, rows)

    def _refused(self, reason: str, way_out: str = WAY_OUT) -> UnsupportedModelError:
        return UnsupportedModelError(self._type, f"it cannot be pooled: {reason}", way_out)
