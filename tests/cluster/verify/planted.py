"""A small OpenAI-compatible server without a network, which is right unless a fault is planted by its name."""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx

WORDS = [f" {a}{b}".encode() for a in ("ka", "lo", "mi", "su", "te") for b in ("ra", "no", "vi", "pu", "shen", "d")]
PARTS = [b"\xf0\x9f", b"\x99\x82", b"\xe6\x97", b"\xa5", b"\xc3", b"\xa9"]  # halves of characters
CHARACTERS = [b"\xf0\x9f\x99\x82", b"\xe6\x97\xa5", b"\xc3\xa9"]
BASE, OTHER, ZERO = "base", "other", "zero"
CONTEXT = 600


def fraction(*key: object) -> float:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@dataclass
class Output:
    """One completion: its tokens, and the candidates at each position."""

    tokens: list[bytes] = field(default_factory=list)
    tops: list[list[tuple[bytes, float]]] = field(default_factory=list)
    finish: str = "length"
    stop_at: int | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        whole = b"".join(self.tokens).decode(errors="ignore")
        return whole if self.stop_at is None else whole[: self.stop_at]


class Body(httpx.AsyncByteStream):
    """An event stream that takes a turn of the loop for each event."""

    def __init__(self, server: "Planted", events: list[bytes]) -> None:
        self.server, self.events = server, events
        self.num_sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self.events:
            await asyncio.sleep(0)
            self.num_sent += 1
            self.server.time_s += 0.001
            yield event

    async def aclose(self) -> None:
        if self.server.fault == "keeps cancelled work":
            self.server.kept += len(self.events) - self.num_sent


class Planted(httpx.AsyncBaseTransport):
    """`fault`: what is wrong; empty: nothing."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.in_flight = self.count = self.number = self.kept = 0
        self.time_s = 0.0
        self.quick_until = math.inf
        """Requests after which each takes seconds."""
        self.cache: dict[str, Output] = {}
        self.streams: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.count += 1
        number = self.count
        self.in_flight += 1
        try:
            await asyncio.sleep(0)
            self.time_s += (0.001 if number <= self.quick_until else 2.0) + 0.01 * self.kept
            self.kept = 0
            await asyncio.sleep(0)
            self.number = number
            return self.answer(request)
        finally:
            self.in_flight -= 1

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/v1/")
        if request.url.path == "/tokenize":
            return self.tokenized(json.loads(request.content))
        if path == "models":
            return httpx.Response(200, json={"data": [{"id": BASE, "max_model_len": CONTEXT}]})
        if path not in ("completions", "chat/completions"):
            return refused(404, "no such path")
        try:
            body = json.loads(request.content)
        except ValueError:
            return refused(500 if self.fault == "500 for bad JSON" else 400, "not JSON")
        if (problem := self.problem(body, path)) is not None:
            return problem
        outputs = [self.output(body, index) for index in range(body.get("n", 1))]
        return self.streamed(body, path, outputs) if body.get("stream") else self.whole(body, path, outputs)

    def tokenized(self, body: dict[str, Any]) -> httpx.Response:
        number = self.num_prompt(body) + (self.fault == "another tokenizer")
        return httpx.Response(200, json={"tokens": [*range(number)]})

    def problem(self, body: dict[str, Any], path: str) -> httpx.Response | None:
        if ("prompt" if path == "completions" else "messages") not in body:
            return refused(400, "no prompt")
        temperature = body.get("temperature", 1)
        is_bad = isinstance(temperature, str) or temperature < 0 or body.get("top_p", 1) > 1 or body.get("n", 1) < 1
        if is_bad and self.fault != "accepts anything":
            return refused(400, "a value out of range")
        if body["model"] not in (BASE, OTHER, ZERO):
            return refused(404, "no such model")
        if self.num_prompt(body) > CONTEXT and self.fault != "cuts prompts":
            return refused(400, "too long")
        return refused(503, "broken") if self.fault == "fails now and then" and self.number % 50 == 0 else None

    def prompt(self, body: dict[str, Any]) -> str:
        return str(body.get("prompt") or body["messages"])

    def num_prompt(self, body: dict[str, Any]) -> int:
        return len(self.prompt(body)) // 4 + 1

    def output(self, body: dict[str, Any], index: int) -> Output:
        prompt = self.prompt(body)
        if self.fault == "stale cache" and self.number % 7 == 0 and self.cache:
            return next(reversed(self.cache.values()))
        model = self.model_of(body)
        out = self.generated(body, model, prompt, index)
        self.cache[prompt] = out
        return out

    def model_of(self, body: dict[str, Any]) -> str:
        name = body["model"]
        if self.fault == "swaps adapters" and self.in_flight > 3 and self.number % 3 == 0:
            return OTHER if name == BASE else BASE
        if name == ZERO and self.fault == "drawn adapter of no zero" and "seed" in body:
            return OTHER
        if name == ZERO and self.fault != "adapter of no zero":
            return BASE
        return BASE if name == OTHER and self.fault == "adapter without effect" else name

    def generated(self, body: dict[str, Any], model: str, prompt: str, index: int) -> Output:
        if "response_format" in body:
            schema = body["response_format"]["json_schema"]["schema"]
            value: Any = instance(schema, schema) if self.fault != "ignores schemas" else {"text": "hello"}
            return written(json.dumps(value, ensure_ascii=False))
        if "tools" in body:
            return self.called(body)
        out = Output()
        most = body.get("max_tokens", 16)
        for position in range(min(most, 64) if "ignore_eos" in body else most):
            top = self.candidates(model, prompt, out.tokens, position)
            token = self.drawn(body, top, position, index)
            out.tokens.append(token)
            out.tops.append(top)
            if self.stopped(out, body):
                break
        return out

    def candidates(self, model: str, prompt: str, tokens: list[bytes], position: int) -> list[tuple[bytes, float]]:
        drift = 0.01 * (self.number % 3) if self.fault == "drifts" else 0.0
        return list(self.likely(model, prompt, tuple(tokens[-3:]), position, drift))

    @cache  # noqa: B019
    def likely(
        self, model: str, prompt: str, tokens: tuple[bytes, ...], position: int, drift: float
    ) -> list[tuple[bytes, float]]:
        if self.fault == "!!!!":
            return [(b"!", 0.0)] + [(word, -20.0) for word in WORDS[:4]]
        key = (model, prompt, position, tokens)
        if tokens and tokens[-1] in PARTS[::2]:
            words = [PARTS[PARTS.index(tokens[-1]) + 1], *WORDS[:4]]
            values = [6.0, 0.0, 0.1, 0.2, 0.3]
        else:
            vocabulary = PARTS[::2] * 2 if "日本" in prompt and position % 4 else WORDS
            number = int(fraction(key) * 1000)
            words = [vocabulary[(number + n) % len(vocabulary)] for n in range(5)]
            words = list(dict.fromkeys(words))
            values = [3 * fraction(key, n) for n in range(len(words))]
        scale = 0.5 if self.fault == "sums above 1" else 1.02
        total = math.log(math.fsum(map(math.exp, values)) * scale)
        pairs = [(word, value - total - drift) for word, value in zip(words, values, strict=True)]
        return sorted(pairs, key=lambda pair: -pair[1])

    def drawn(self, body: dict[str, Any], top: list[tuple[bytes, float]], position: int, index: int) -> bytes:
        temperature = body.get("temperature", 1)
        if temperature in (0, "hot", -1):
            wrong = self.fault == "depends on the batch" and self.in_flight > 2 and position == 5
            wrong |= self.fault == "not the likeliest" and position == 3
            wrong |= self.fault == "varies" and self.number % 3 == 0 and position == 6
            wrong |= self.fault == "n differs" and index > 0 and position == 2
            wrong |= self.fault == "cold differs" and self.prompt(body) not in self.cache and position == 4
            wrong |= self.fault == "logprobs change it" and "logprobs" in body and position == 4
            return top[1 if wrong and top[0][0] not in PARTS else 0][0]
        seed = self.number if self.fault == "ignores seeds" else body.get("seed", self.number)
        seed = 0 if self.fault == "one seed" else seed
        seed = self.number if self.fault == "drawn n differs" and index else seed
        noise = lambda n: -math.log(-math.log(fraction(seed, position, n, index)))  # noqa: E731
        return max(enumerate(top), key=lambda one: one[1][1] / temperature + noise(one[0]))[1][0]

    def stopped(self, out: Output, body: dict[str, Any]) -> bool:
        if self.fault == "ignores stop":
            return False
        text = b"".join(out.tokens).decode(errors="ignore")
        places = [text.find(stop) for stop in body.get("stop", ()) if stop in text]
        if places:
            leak = 2 if self.fault == "stops late" else 0
            out.finish, out.stop_at = "length" if self.fault == "finish of a stop" else "stop", min(places) + leak
        return bool(places)

    def called(self, body: dict[str, Any]) -> Output:
        choice = body["tool_choice"]
        tool = body["tools"][0 if choice == "required" else 1]["function"]
        arguments = json.dumps(instance(tool["parameters"], {}))
        if self.fault == "mangles arguments":
            arguments = arguments.replace('"', "'")
        if self.fault == "mangles streamed arguments" and body.get("stream"):
            arguments = arguments[:-1] + ", }"
        return Output(calls=[{"name": tool["name"], "arguments": arguments}], finish="tool_calls", tokens=[b"x"])

    def usage(self, body: dict[str, Any], outputs: list[Output]) -> dict[str, int]:
        prompt, completion = self.num_prompt(body), sum(len(out.tokens) for out in outputs)
        prompt = min(prompt, CONTEXT)
        completion += self.fault == "wrong usage"
        prompt += self.fault == "wrong streamed usage" and bool(body.get("stream"))
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def finish(self, out: Output) -> str:
        return "stop" if self.fault == "wrong finish" and out.finish == "length" else out.finish

    def logprobs(self, body: dict[str, Any], out: Output, path: str) -> Any:
        if "logprobs" not in body:
            return None
        number = 1 if self.fault == "truncates top logprobs" else 5
        least = int(self.fault == "hides the chosen token")
        tokens = out.tokens[:-3] if self.fault == "truncates logprobs" else out.tokens
        rows = [
            (
                token.decode(errors="replace"),
                dict(top)[token],
                [(a.decode(errors="replace"), b) for a, b in top[least:number]],
            )
            for token, top in zip(tokens, out.tops, strict=False)
        ]
        if self.fault == "NaN":
            rows = [(text, math.nan, top) for text, _, top in rows]
        if path == "completions":
            texts, values, tops = ([*column] for column in zip(*rows, strict=True))
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": [dict(top) for top in tops]}
        entry = lambda text, value: {"token": text, "logprob": value}  # noqa: E731
        return {"content": [entry(a, b) | {"top_logprobs": [entry(*one) for one in top]} for a, b, top in rows]}

    def whole(self, body: dict[str, Any], path: str, outputs: list[Output]) -> httpx.Response:
        choices = []
        for index, out in enumerate(outputs):
            text = out.text + ("\ufffd" if self.fault == "cuts characters" and out.tokens[-1] in PARTS[::2] else "")
            if self.fault == "cuts characters":
                text = b"".join(out.tokens).decode(errors="replace")[: out.stop_at]
                text = text.replace("日", "\ufffd\ufffd") if len(out.tokens) % 2 else text
            if body.get("echo"):
                text = self.prompt(body)[self.fault == "echo without its beginning" :] + text
                text += "!" * (self.fault == "echo with another end")
            said = {"text": text} if path == "completions" else {"message": self.message(out, text)}
            choice = {"index": index, "finish_reason": self.finish(out), **said}
            choices.append(choice | {"logprobs": self.echoed(body, self.logprobs(body, out, path))})
        answer = {"id": f"x-{self.number}", "choices": choices, "usage": self.usage(body, outputs)}
        return httpx.Response(200, content=json.dumps(answer).encode())

    def echoed(self, body: dict[str, Any], logprobs: Any) -> Any:
        if not (body.get("echo") and logprobs):
            return logprobs
        prompt = self.prompt(body)
        pieces = [prompt[n : n + 4] for n in range(0, len(prompt), 4)]
        factor = 1.1 if self.fault == "other weights" else 1.0
        values = [None, *(-3 * factor * fraction(piece) for piece in pieces[1:])]
        first = {"tokens": pieces, "token_logprobs": values, "top_logprobs": [None] * len(pieces)}
        return {key: first[key] + logprobs[key] for key in first}

    def message(self, out: Output, text: str) -> dict[str, Any]:
        calls = [{"id": "c", "type": "function", "function": call} for call in out.calls]
        return {"role": "assistant", "content": None if calls else text} | ({"tool_calls": calls} if calls else {})

    def streamed(self, body: dict[str, Any], path: str, outputs: list[Output]) -> httpx.Response:
        events: list[dict[str, Any]] = []
        for index, out in enumerate(outputs):
            for n, piece in enumerate(self.pieces(out)):
                part = Output(out.tokens[n : n + 1], out.tops[n : n + 1])
                said = {"text": piece} if path == "completions" else {"delta": {"content": piece}}
                if out.calls:
                    call = {"index": 0, "function": out.calls[0]}
                    said = {"delta": {"tool_calls": [call]}}
                told = self.logprobs(body, part, path) if part.tops else None
                events.append({"choices": [{"index": index, **said, "logprobs": told}]})
            end = {"text": ""} if path == "completions" else {"delta": {}}
            if self.fault != "unfinished streams":
                events.append({"choices": [{"index": index, **end, "finish_reason": self.finish(out)}]})
        if self.fault == "two ids":
            events[0]["id"] = "another"
        events.append({"choices": [], "usage": self.usage(body, outputs)})
        lines = [b"data: " + json.dumps({"id": f"x-{self.number}"} | event).encode() + b"\n\n" for event in events]
        if self.fault == "breaks characters in streams":
            lines = [line.replace(b"\\u65e5", b"\\ufffd\\ufffd") for line in lines]
        if self.fault == "bytes that are no text":
            lines[0] = lines[0].replace(b'"text"', b'"text\xff"').replace(b'"content"', b'"content\xff"')
        stream = Body(self, [*lines, b"data: [DONE]\n\n"])
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)

    def pieces(self, out: Output) -> list[str]:
        """Text by token; incomplete characters wait for their rest."""
        lengths = [len(b"".join(out.tokens[: n + 1]).decode(errors="ignore")) for n in range(len(out.tokens))]
        text = out.text
        pieces = [text[before:after] for before, after in zip([0, *lengths], lengths, strict=False)]
        at = len(pieces) // 2
        while at and not pieces[at].strip():
            at -= 1
        if len(pieces) > 4 and self.fault == "drops a byte" and self.number % 3 == 0:
            pieces[at] = pieces[at][1:]
        if len(pieces) > 4 and self.fault == "repeats a chunk" and self.number % 3 == 0:
            pieces[at] *= 2
        if len(pieces) > 4 and self.fault == "mixes streams" and self.in_flight > 1 and self.streams:
            other = self.streams[-1]
            pieces[at:] = [other, *[""] * (len(pieces) - at - 1)]
        self.streams.append(text)
        return pieces


def refused(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}})


def written(text: str) -> Output:
    """A text as tokens of three characters, after which the model has ended by itself."""
    tokens = [text[n : n + 3].encode() for n in range(0, len(text), 3)]
    return Output(tokens=tokens, tops=[[(token, -0.1)] for token in tokens], finish="stop")


def instance(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """The simplest value of a schema of the corpus."""
    if "$ref" in schema:
        return instance(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for key in ("enum", "anyOf", "oneOf", "allOf"):
        if key in schema:
            return schema[key][0] if key == "enum" else instance(schema[key][0], root)
    if "const" in schema:
        return schema["const"]
    if schema["type"] == ["boolean", "null"]:
        return None
    kinds: dict[str, Any] = {
        "object": lambda: {name: instance(one, root) for name, one in schema.get("properties", {}).items()},
        "array": lambda: (
            [instance(one, root) for one in schema.get("prefixItems", ())]
            or [instance(schema["items"], root)] * schema.get("minItems", 0)
        ),
        "string": lambda: {"pattern": "AB123", "format": "2026-02-28"}.get(
            next((key for key in ("pattern", "format") if key in schema), ""), "a" * schema.get("minLength", 0)
        ),
        "integer": lambda: schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1),
        "boolean": lambda: True,
        "null": lambda: None,
    }
    return kinds[schema["type"]]()
