"""The flags of `holdfast generate` that say how to draw and when to stop: one for each field of `SamplingParams`.

What may not live here: commands, and what the parameters mean. `SamplingParams` checks the values, as from anywhere.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.cluster.config.flags import ENDING, REPORT, SAMPLING, STRUCTURE
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs


def _draw(help: str) -> Parameter:
    return Parameter(group=SAMPLING, help=help, negative=())


def _shape(help: str) -> Parameter:
    return Parameter(group=STRUCTURE, help=help, negative=())


def _end(help: str) -> Parameter:
    return Parameter(group=ENDING, help=help, negative=())


def _report(help: str) -> Parameter:
    return Parameter(group=REPORT, help=help, negative=())


_Texts = list[str] | None
_Ids = list[int] | None


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Fields are named as in `SamplingParams`; the kinds of structured output are flags of their own."""

    temperature: Annotated[float, _draw("0 takes the likeliest token every time")] = 0.0
    top_k: Annotated[int, _draw("draw among the k best; 0 for all")] = 0
    top_p: Annotated[float, _draw("draw among the best with this mass")] = 1.0
    min_p: Annotated[float, _draw("draw among those with this share of the best's")] = 0.0
    seed: Annotated[int, _draw("key of the draws")] = 0
    repetition_penalty: Annotated[float, _draw("above 1 avoids tokens of prompt and output")] = 1.0
    presence_penalty: Annotated[float, _draw("above 0 avoids tokens of the output")] = 0.0
    frequency_penalty: Annotated[float, _draw("above 0 avoids tokens the more often the output has them")] = 0.0
    logit_bias: Annotated[_Texts, _draw("TOKEN_ID=BIAS, added to the logit of a token; may be repeated")] = None
    allowed_token_ids: Annotated[_Ids, _draw("a token id that may be drawn, and none but such; may be repeated")] = None
    bad_words: Annotated[_Texts, _draw("text that must not come up; may be repeated")] = None

    json_schema: Annotated[str | None, _shape("a JSON schema that the output follows, or a file that holds one")] = None
    json_object: Annotated[bool, _shape("the output is a JSON object")] = False
    regex: Annotated[str | None, _shape("what the whole output matches")] = None
    choice: Annotated[_Texts, _shape("one of the texts that the output can be; may be repeated")] = None
    grammar: Annotated[str | None, _shape("a Lark grammar that the output follows, or a file that holds one")] = None

    max_tokens: Annotated[int | None, _end("at most this many tokens; none for as many as the context holds")] = 64
    min_tokens: Annotated[int, _end("at least this many tokens before it may end")] = 0
    stop: Annotated[_Texts, _end("text that ends the output; may be repeated")] = None
    stop_token_ids: Annotated[_Ids, _end("a token id that ends the output; may be repeated")] = None
    ignore_eos: Annotated[bool, _end("go on after the model's end of sequence")] = False
    include_stop_str_in_output: Annotated[bool, _end("keep the stop text at the end of the output")] = False

    n: Annotated[int, Parameter(name=["--n", "-n"], group=REPORT, help="completions to show")] = 1
    best_of: Annotated[int | None, _report("completions to draw, the n likeliest of which are shown")] = None
    beam_width: Annotated[int | None, _report("search with so many beams instead of drawing")] = None
    length_penalty: Annotated[float, _report("of a beam search: above 1 favours long outputs")] = 1.0
    logprobs: Annotated[int | None, _report("show each token's log-probability, and so many best ones")] = None
    prompt_logprobs: Annotated[int | None, _report("the same for the prompt's tokens")] = None
    echo: Annotated[bool, _report("show the prompt before the output")] = False
    truncate_prompt_tokens: Annotated[int | None, _report("keep the prompt's last tokens; -1: as many as fit")] = None
    skip_special_tokens: Annotated[
        bool,
        Parameter(group=REPORT, negative="--keep-special-tokens", help="leave tokens such as the end out of the text"),
    ] = True

    def params(self) -> SamplingParams:
        """Raises `InvalidRequestError`, and `ConfigurationError` for what is not even of the right form."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(_bias(text) for text in self.logit_bias or ()),
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words or (),
            structured_outputs=self._structured_outputs(),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            n=self.n,
            best_of=self.best_of,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            echo=self.echo,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            skip_special_tokens=self.skip_special_tokens,
        )

    def _structured_outputs(self) -> StructuredOutputs | None:
        wishes = (self.json_schema, self.json_object, self.regex, self.choice, self.grammar)
        if not any(wish not in (None, False) for wish in wishes):
            return None
        schema_is_text = self.json_schema is None or self.json_schema.lstrip().startswith("{")
        grammar_is_text = self.grammar is None or ":" in self.grammar
        return StructuredOutputs(
            json=self.json_schema if schema_is_text else _read("--json-schema", self.json_schema),
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar if grammar_is_text else _read("--grammar", self.grammar),
        )


def _read(flag: str, path: str | None) -> str:
    try:
        return Path(path or "").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag}: neither the text itself nor a file to be read: {error}") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ConfigurationError(f"--logit-bias {text!r}: must be TOKEN_ID=BIAS, such as 42=-5") from None
