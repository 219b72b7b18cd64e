"""A sampling parameter is declared once: what a new one touches is counted, and a new one is tried on all its ways."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import pytest
from cyclopts import App
from cyclopts import Parameter as Option
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pydantic import Field

from holdfast.cluster.commands.sampling_flags import flags_of
from holdfast.v1 import engine_pb2, inference_pb2
from holdfast.worker import sampling_params
from holdfast.worker.draws import DRAW_TYPES, PENALTIES
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import Declarations, Group, Metadata, Scope
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.wire import sampling_fields
from holdfast.worker.wire.sampling_fields import TOKEN_SCOPE, fields_of, params_of
from scripts.draw_records import HEADER, header
from scripts.flag_table import sampling_flags
from scripts.sampling_docs import PAGE, table, with_table

ROOT = Path(__file__).parent.parent
MOST = 5
"""The declaration, the message of each wire, and what gives it its meaning."""
ALSO_OTHER_THINGS = {"seed", "logprobs", "prompt_logprobs"}
"""A model and a simulation have seeds too, and outputs have the log-probabilities that were asked for."""
NOT_OURS = (
    "worker/models/",
    "worker/executors/cpu/",
    "worker/executors/gpu/",
    "worker/executors/layout.py",
    "proto/holdfast/foreign/",
    "router/api/vllm/",
    "router/api/http/messages_body.py",
    "router/api/http/responses_body.py",
    "worker/wire/link_requests.py",
    "router/wire/bounds.py",
    "router/request.py",
)
"""A model's own numbers (`top_k` experts), protocols of others, which get a parameter when their authors say so, and
the bounds of what can grow: a field without one is found when a server starts, and by a test that names it."""
IN_ONE_PLACE = {"min_p", "length_penalty"}
"""Parameters whose whole meaning is in a file or two, so that their very name is in no more than `MOST`."""


@cache
def sources() -> dict[str, str]:
    paths = [path for package in ("worker", "router", "cluster") for path in (ROOT / package).rglob("*.py")]
    paths += (ROOT / "proto").rglob("*.proto")
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    return {path: text for path, text in texts.items() if not path.startswith(NOT_OURS)}


@cache
def carried(text: str) -> frozenset[str]:
    """Names that a file declares as fields, hands on from like to like (`min_p=params.min_p`), or lists with others."""
    return frozenset(_carried(text))


def _carried(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield from (item.target.id for item in node.body if isinstance(item, ast.AnnAssign))
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Attribute) and node.value.attr == node.arg:
            yield node.value.attr
        elif isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            listed = {item.value for item in items if isinstance(item, ast.Constant)} & PARAMETERS.keys()
            yield from listed if len(listed) > 2 else ()


def carriers(name: str) -> list[str]:
    """Files that would have to be touched for a parameter, were it new."""
    found = []
    for path, text in sources().items():
        in_proto = path.endswith(".proto") and re.search(
            rf"^message (SamplingParams|EngineSamplingParams) {{[^}}]* {name} = ", text, re.M
        )
        if in_proto or (path.endswith(".py") and name in carried(text)):
            found.append(path)
    return found


def test_the_count_sees_what_carries_a_parameter():
    assert "proto/holdfast/v1/engine.proto" in carriers("min_p")
    assert "worker/sampling_params.py" in carriers("min_p")
    assert carried("class Copy:\n    min_p: float\n") == {"min_p"}
    assert carried("Message(min_p=params.min_p, top_k=3)") == {"min_p"}
    assert carried("OPTIONAL = ('n', 'seed', 'top_k')") == {"n", "seed", "top_k"}


@pytest.mark.parametrize("name", sorted(PARAMETERS.keys() - ALSO_OTHER_THINGS))
def test_few_files_carry_a_parameter(name):
    assert len(carriers(name)) <= MOST, carriers(name)


@pytest.mark.parametrize("name", sorted(IN_ONE_PLACE))
def test_few_files_know_a_parameter_whose_meaning_is_in_one_place(name):
    known = [path for path, text in sources().items() if re.search(rf"\b{name}\b", text)]
    assert len(known) <= MOST, known


def test_wires_flags_and_types_keep_no_lists_of_parameters():
    for path in sources():
        if path.endswith(
            (
                "codec.py",
                "replica_link.py",
                "link_server.py",
                "sampling_flags.py",
                "sampling_fields.py",
                "parameters.py",
            )
        ):
            named = {name for name in PARAMETERS.keys() - {"n", "stop", "seed"} if name in carried(sources()[path])}
            # Pooled requests have these two as well, which are fields of their own messages.
            of_pooling = {"truncate_prompt_tokens", "truncate_right"} if path.endswith("pooling_codec.py") else set()
            assert named <= {"logprobs", "prompt_logprobs", "grammar"} | of_pooling, path


def test_the_page_has_the_table_of_the_declarations():
    page = PAGE.read_text()
    assert with_table(page, table(PARAMETERS.values())) == page, "run `python -m scripts.sampling_docs`"


# --- the records of draws: one table, which every executor reads ---

EXECUTORS = {
    "C++": {"sampler.cpp", "edits.h"},
    "Triton": {"draws.py", "edits.py", "reports.py"},
}


def read_by(executor: str, field: str) -> bool:
    """Whether the sources of an executor's draws read a field of a record."""
    if executor == "C++":
        folder, pattern = "worker/executors/cpu/native", rf"\b(draw|e\.penalties)\.{field}\b"
    else:
        place = "GIVEN" if field == "token" else field.upper()
        folder, pattern = "worker/executors/gpu/kernels", rf"\b(records?|RECORD|edit) \+ {place}\b"
    return any(re.search(pattern, (ROOT / folder / file).read_text()) for file in EXECUTORS[executor])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor_reads_every_field_of_a_draw(executor):
    assert [field for field in (*DRAW_TYPES, *PENALTIES) if not read_by(executor, field)] == []
    assert not read_by(executor, "warmth")


@pytest.mark.parametrize(("name", "most"), [("min_p", 5), *((name, 6) for name in PENALTIES)])
def test_few_files_are_written_by_hand_for_what_changes_a_draw(name, most):
    """Executors in C++ and Triton among them; not protocols of others, and the simulator's own model of a draw."""
    paths = [path for kind in ("py", "cpp", "h", "proto") for path in (ROOT / "worker").rglob(f"*.{kind}")]
    paths += (ROOT / "proto/holdfast/v1").glob("*.proto")
    known = [path.name for path in paths if re.search(rf"\b({name}|{name.upper()})\b", path.read_text())]
    assert len(set(known) - {HEADER.name}) <= most, known


def test_the_records_in_c_are_those_of_the_declarations():
    assert HEADER.read_text() == header(), "run `python -m scripts.draw_records`"


# --- a new parameter: declared, and said in the messages; nothing else ---


@dataclass(slots=True, kw_only=True)
class Warmer(SamplingParams):
    warmth: Annotated[
        float, Field(ge=0, le=1, description="how warm it is"), Metadata(scope=Scope.TOKENS, group=Group.SAMPLING)
    ] = 0.5


def message_with(module: object, name: str, **kind: object):
    """A message of Holdfast's that has a field `warmth` as well."""
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    (message,) = (item for item in file.message_type if item.name == name)
    message.field.add(name="warmth", number=900, label=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE, **kind)
    if kind:
        message.oneof_decl.add(name="_warmth")
        message.field[-1].oneof_index = len(message.oneof_decl) - 1
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"holdfast.v1.{name}"))


@pytest.fixture
def parameters(monkeypatch):
    declarations = Declarations(Warmer)
    monkeypatch.setattr(sampling_params, "PARAMETERS", declarations)
    monkeypatch.setattr(sampling_fields, "PARAMETERS", declarations)
    monkeypatch.setattr(sampling_fields, "SamplingParams", Warmer)
    return declarations


def test_a_new_parameter_is_checked(parameters):
    assert Warmer(warmth=1).warmth == 1
    with pytest.raises(InvalidRequestError, match=r"sampling_params\.warmth = 2: must be in \[0, 1\]"):
        Warmer(warmth=2)
    with pytest.raises(InvalidRequestError, match=r"sampling_params\.warmth = 'hot': must be a number"):
        Warmer().with_changes(warmth="hot")


@pytest.mark.parametrize("warmth", [0.0, 0.5, 0.7])
def test_a_new_parameter_travels_on_both_wires(parameters, warmth):
    params = Warmer(warmth=warmth, seed=0)
    public = message_with(inference_pb2, "SamplingParams", proto3_optional=True)
    assert params_of(public.FromString(public(**fields_of(params, public)).SerializeToString())) == params
    link = message_with(engine_pb2, "EngineSamplingParams")
    said = link(**fields_of(params, link, TOKEN_SCOPE))
    assert params_of(link.FromString(said.SerializeToString()), TOKEN_SCOPE) == params


def test_a_new_parameter_has_a_flag_and_a_row(parameters):
    made = flags_of(sampling_flags(parameters.values()))
    app = App(result_action="return_value")

    @app.default
    def show(*, flags: Annotated[made, Option(name="*")] = made()) -> float:  # noqa: B008  # frozen
        return flags.warmth

    assert app(["--warmth", "0.3"]) == 0.3
    assert app([]) == 0.5
    assert "| `warmth` | 0.5 | 0 to 1 | how warm it is |\n" in table(parameters.values())
