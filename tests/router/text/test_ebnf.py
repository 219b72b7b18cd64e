"""EBNF as XGrammar, vLLM and llama.cpp write it: what matches, and what is no grammar."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from holdfast.router.text.ebnf import ebnf_as_lark, is_ebnf
from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.grammar_rules import derivable
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.structured_outputs import StructuredOutputs
from tests.router.schemas.walks import BUNDLED, Walker

SUM = 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9]+ | "(" sum ")"'
OBJECT = (
    'root ::= "{" (pair ("," pair)*)? "}"\npair ::= string ":" value\nvalue ::= string | root\n'
    r'string ::= "\"" ([^"\\] | "\\" .)* "\""'
)


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(ebnf_as_lark(grammar)), log_level=0)
    token_ids = list(text.encode())
    return (not token_ids or matcher.consume_tokens(token_ids)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= "yes" | "no"\n', ["yes", "no"], ["ye", "yesno", "maybe"]),
        ('root ::= "yes"\n    | "no"  # over lines, as XGrammar takes it\n', ["yes", "no"], ["x"]),
        ('# a comment\n\nroot ::= ("x" | )', ["x", ""], ["xx"]),
        ('root ::= a-b? "."\na-b ::= "\\u00e9\\x41\\n"', ["éA\n.", "."], ["é."]),
        ("root ::= [^\\]\\-a-c-]{2}", ["xy", "\né"], ["ax", "-x", "x"]),
        ("root ::= [a-]{1,3} .", ["a-a\n", "-x"], ["x", "aaaaa"]),
        ('root ::= "ab" "d" | "a" "bc"', ["abd", "abc"], ["ab", "abdc"]),
        ('root ::= "a" root | ""', ["", "aaa"], ["b"]),
        (SUM, ["(1+22)+3"], ["(1+", "1++2"]),
        (OBJECT, ['{"a":{"b\\"":"c"}}', "{}"], ['{"a"}']),
        (r'root ::= "<|endoftext|>" "\"\\/"', ['<|endoftext|>"\\/'], [""]),
    ],
)
def test_what_matches(grammar: str, texts: list[str], others: list[str]):
    assert is_ebnf(grammar)
    assert [text for text in texts if not matches(grammar, text)] == []
    assert [text for text in others if matches(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("root ::= x", "root refers to x"),
        ('x ::= "a"', "must define root"),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: root is defined twice"),
        ("root ::= [z-a]", "z-a"),
        ('root ::= "a"{3,2}', "{3,2}"),
        ('root ::= "a"{100000}', "at most"),
        ('root ::= "a"{0}', "{0}: the last count must be at least 1"),
        (r'root ::= "\xZZ"', "escape"),
        (r"root ::= [\ud800]", "no character"),
        ("root ::= []", "must not be empty"),
        ('root ::= ("a"', "cannot be enforced"),
        ("root ::= a\na ::= b\nb ::= a", "root matches no finite text"),
        ('root ::= "a" root', "root matches no finite text"),
        ('root ::= "x" | (a "y")\na ::= "(" a ")"', "a matches no finite text"),
        ("root ::= [^\\x00-\\U0010FFFF]", "no output matches"),
        ("start: a\na: b\nb: a", "start matches no finite text"),
        ('start: "x" | a  // never\n!a.2: /b/ [a] a', "a matches no finite text"),
        ("start: A\nA: /a/ & /b/", "no output matches"),
        ('start: "a" x\nx: "b" x\n%ignore " "', "start matches no finite text"),
        ("start: INT x\n%import common.INT\nx: INT x -> more", "start matches no finite text"),
        ('start: x\nx: %json {"const": 1} x', "start matches no finite text"),
        ('start: x\nx[capture="%json"]: "a" x  # %import', "start matches no finite text"),
        ('start: "a"\n%declare FOO', "%declare is not known here: directives are %ignore, %import"),
        ('start: "a"\n%override start: "b"', "%override is not known here"),
        ('start: "a"\n%extend start: "b"', "%extend is not known here"),
        ('start: "a"\n%Ignore " "', "%Ignore is not known here"),
        ("start: x\n%import python.NAME -> x", "Unknown common regex: python.NAME"),
        ("start: %json", "%json must be followed by JSON"),
        ('start: %json {"type": "object"', "%json must be followed by JSON"),
        ("start: %json " + "[" * 100_000, "nested too deeply"),
        ('start: %json {"const": 9007199254740993}', "9007199254740993"),
        ('start: %json {"uniqueItems": true, "x-guidance": {"lenient": true}}', "uniqueItems"),
        ('start: %lark {\nstart: %json {"not": {}}\n}', "not"),
    ],
)
def test_what_is_none_or_never_ends_is_refused_by_line_or_rule(grammar: str, named: str):
    with pytest.raises(InvalidRequestError) as refused:
        GrammarCompiler(Tokenizer.load(str(BUNDLED))).compile(StructuredOutputs(grammar=grammar))
    assert refused.value.field == "sampling_params.structured_outputs.grammar"
    assert named in refused.value.limit


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= root "a" | "a"',
        'root ::= ("(" root ")")? "x"',
        'root ::= ("x" | a){0,3} root{0,1} root*\na ::= "(" root ")"',
        'start: "x" [start] | start "y"',
        'start: item{2,}\nitem: "a" | item "b" | (item "c")',
        "start: NUMBER\nNUMBER: /[0-9]+/",
        '%llguidance {}\nstart: "a" %json {"type": "object"}',
        'start: "a" [x]\nx: "b" x?\n%ignore " "\n| /\\t/',
        'start: "%foo" /%bar/  // %baz\n# %qux',
    ],
)
def test_rules_that_end_are_taken_however_they_refer_to_themselves(grammar: str):
    GrammarCompiler(Tokenizer.load(str(BUNDLED))).compile(StructuredOutputs(grammar=grammar))


def test_rules_cost_no_more_than_their_length_however_they_refer_to_each_other():
    num_rules = 3000
    chain = "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1}" for n in range(num_rules)), f'r{num_rules} ::= "a"'])
    derived_from = []

    class Watched(str):
        __slots__ = ()

        def __hash__(self) -> int:
            derived_from.append(self)
            return super().__hash__()

    found = derivable((Watched(n), [Watched(n + 1)] * (n < num_rules)) for n in range(num_rules + 1))
    assert len(found) == num_rules + 1
    assert len(derived_from) < 8 * num_rules
    assert "start: T_0" in ebnf_as_lark(chain)


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('start: "a" "b"\n%ignore " "', ["ab", "a b", "a  b"], ["a\nb"]),
        ('start: N ("+" N)*\n%import common.INT -> N\n%import common.WS\n%ignore WS', ["1+2", "1 +\n2"], ["1-2"]),
        ('start: "=" %json {"enum": [1, "%json 2"]}', ["=1", '="%json 2"'], ["= 1", "=2"]),
        ('start: %json {"type": "object", "properties": {"a": {"const": 1}}}', ['{"a":1}'], ['{ "a": 1 }', '{"a":2}']),
        ('start: %regex {"substring_words": "one two three"}', ["two three"], ["three two"]),
        ('start: "<" %lark {\nstart: "b" %json {"const": 3}\n}\n', ["<b3"], ["<b"]),
    ],
)
def test_what_directives_of_lark_mean(grammar: str, texts: list[str], others: list[str]):
    compiled = GrammarCompiler(Tokenizer.load(str(BUNDLED))).compile(StructuredOutputs(grammar=grammar))
    matches = []
    for text in texts + others:
        matcher = LLMatcher(LLTokenizer("byte"), compiled, log_level=0)
        matches.append(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())
    assert matches == [True] * len(texts) + [False] * len(others)


@pytest.mark.parametrize("lark", ['start: "a"', '// root ::= "x"\nstart: "::="', '%llguidance {}\nstart: "a"'])
def test_lark_is_read_as_lark(lark: str):
    assert not is_ebnf(lark)
    GrammarCompiler(Tokenizer.load(str(BUNDLED))).compile(StructuredOutputs(grammar=lark))


def test_walks_over_real_tokens_match():
    walker = Walker()
    for grammar in (SUM, OBJECT):
        compiled = walker.compile(grammar=grammar)
        done = [walk.text for seed in range(8) if (walk := walker.walk(compiled, seed)).end == "done"]
        assert done
        assert all(matches(grammar, text) for text in done)
