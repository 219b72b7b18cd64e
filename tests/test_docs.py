"""What the documentation says can be typed, can be typed; what it points to is there."""

import ast
import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.cluster.commands.cli import app
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.flags import flag_table
from holdfast.router.dispatch.policy import HashRing, RoutingSnapshot
from holdfast.router.dispatch.prefix_index import NO_MATCH, PrefixMatch
from holdfast.worker.models import families
from holdfast.worker.models.formats import gguf_architectures
from scripts import docs_site
from scripts.house_figures import House

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text() for page in PAGES}
HOUSE = House(ROOT)
FOLDERS = ("worker", "router", "cluster", "proto", "tests", "docs", "benchmarks", "scripts", "k8s")


def mentions(pattern: str) -> set[str]:
    return {found for text in TEXT.values() for found in re.findall(pattern, text, re.MULTILINE)}


def test_the_files_that_are_named_exist():
    named = mentions(rf"\b((?:{'|'.join(FOLDERS)})/[\w/.-]*\w)")
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_links_between_pages_lead_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\((?!https?://)([^)#]+)", TEXT[page.name])
        assert not [link for link in links if not (page.parent / link).exists()], page.name


def test_the_verbs_of_make_exist():
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert mentions(r"(?:^ +|`)make ([a-z-]+)") <= verbs


def test_the_commands_parse():
    lines = mentions(r"^ +(?:\.venv/bin/)?holdfast (.+)$")
    for words in sorted({tuple(shlex.split(line, comments=True)) for line in lines}):
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_flags_of_serve_beside_those_of_vllm_exist():
    rows = re.findall(r"^\| `--.*?\| (.*) \|$", TEXT["vllm.md"], re.MULTILINE)
    named = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)}
    assert len(rows) >= 10
    assert named <= {f"--{one.path.rpartition('.')[2]}".replace("_", "-") for one in flag_table().settings}


def test_the_commands_against_a_symptom_parse():
    for line in sorted(set(re.findall(r"`holdfast ([^`]+)`", TEXT["troubleshooting.md"]))):
        app.parse_args(shlex.split(line), exit_on_error=False, print_error=False)


def test_the_messages_of_symptoms_are_those_of_the_code():
    rows = re.findall(r"^\| (.*?) \|", TEXT["troubleshooting.md"], re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]* [^`]*)`", row)]
    nodes = (node for source in HOUSE.sources for node in ast.walk(source.tree))
    said = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    parts = {part.strip(" (),") for message in messages for part in message.split("...")} - {""}
    assert len(parts) > 10
    assert not [part for part in parts if part not in said]


def program_of(page: str) -> str:
    return re.search(r"```python\n(.*?)```", TEXT[page], re.DOTALL).group(1)


def test_the_routing_policy_of_the_page_chooses_holders_of_the_longest_prefix():
    names: dict[str, Any] = {}
    exec(compile(program_of("write-a-routing-policy.md"), "write-a-routing-policy.md", "exec"), names)
    snapshot = RoutingSnapshot(
        scores=(5.0, 0.0, 9.0),
        num_open=3,
        total_score=14.0,
        token_s=(None,) * 3,
        typical_token_s=1e-3,
        ring=HashRing(),
        last=-1,
        random_index=lambda n: 0,
        prefix=PrefixMatch(((32, 0b100), (16, 0b001))),
    )
    assert names["longest_prefix"](snapshot) == 2
    assert names["longest_prefix"](snapshot._replace(prefix=NO_MATCH)) in (0, 1, 2)


def test_the_entries_of_the_pages_that_add_something_are_entries():
    entry = eval("{" + program_of("add-a-model.md") + "}", dict(vars(families)))
    own = {"architecture": "MyModelForCausalLM", "gate_up": ("gate_up_proj",)}
    assert entry["my_model_type"] == replace(families.FAMILIES["qwen2"], **own)
    assert indent(program_of("add-a-parameter.md"), "    ") in (ROOT / "worker" / "sampling_params.py").read_text()


def test_the_readmes_program_prints_what_it_promises(capsys):
    exec(compile(program_of("README.md"), "README.md", "exec"), {})
    assert "The capital of France is Paris" in capsys.readouterr().out


def test_the_readme_counts_model_types_and_architectures_as_the_code_has_them():
    types = re.findall(r"^\| `(\w+)` \|", TEXT["models.md"].split("| model type | one rank")[1], re.MULTILINE)
    assert set(families.DECODERS) <= set(types)
    assert f"{len(types)} Hugging Face model types" in TEXT["README.md"]
    num_architectures = len(gguf_architectures.ARCHITECTURES)
    assert f"GGUF files of {num_architectures} architectures" in TEXT["README.md"]


MAX_STATIONS = 12


def test_the_way_of_a_request_is_short_and_its_stations_exist():
    page = TEXT["life-of-a-request.md"]
    for title in ("The way down", "The way up"):
        part = page.split(f"## {title}\n")[1].split("\n## ")[0]
        stations = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", part, re.MULTILINE)
        assert 8 < len(stations) <= MAX_STATIONS, title
        assert all((ROOT / station).exists() for station in stations)


def test_the_table_of_rooms_names_every_folder_of_code():
    named = re.findall(r"^\| `([\w/]+)/` \|", TEXT["architecture.md"], re.MULTILINE)
    paths = [path for package in ("worker", "router", "cluster") for path in (ROOT / package).rglob("*.py")]
    there = {str(path.parent.relative_to(ROOT)) for path in paths if path.name != "__init__.py"}
    assert set(named) == there
    assert len(named) == len(there)


def test_the_site_has_every_page_and_its_reference_every_setting_and_rpc():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = {page for group in site["nav"] for pages in group.values() for page in _paths(pages)}
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert named == written | {f"reference/{name}.md" for name in ("commands", "python", "rpcs", "settings")}
    pages = docs_site.settings(), docs_site.rpcs()
    for section, field in HoldfastConfig.model_fields.items():
        part = pages[0].split(f"## {section}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) == list(field.annotation.model_fields)
    for method in ("Generate", "GenerateStream", "Drain"):
        assert f"| `{method}` |" in pages[1]


def test_the_reference_has_every_public_name_and_each_has_a_docstring():
    page = docs_site.python_names()
    for name, module in holdfast.HOMES.items():
        assert f"\n::: {module}.{name}\n" in page
        offered = getattr(holdfast, name)
        members = vars(offered).items() if inspect.isclass(offered) else ()
        public = {key: one for key, one in members if not key.startswith("_")}
        heard = {key: one for key, one in public.items() if inspect.isfunction(one) or isinstance(one, property)}
        assert [key for key, one in heard.items() if not inspect.getdoc(one)] == [], name
    assert set(holdfast.__all__) - set(holdfast.HOMES) == {"__version__", *holdfast.NAMES_IN_VLLM}


def _paths(pages: object) -> list[str]:
    return [pages] if isinstance(pages, str) else [path for page in pages for path in page.values()]


NO_SUBJECT = re.compile(
    r'^\s*"""((?:What|Of|Those|It|As|That|So|Who|Whom|Whose|Something|By|Where|How)\b.*)', re.MULTILINE
)


def test_docstrings_begin_with_the_noun_that_they_describe():
    """Those that begin with "What" or "Of" leave it to the reader to find out what is meant."""
    found = [f"{source.name}: {line}" for source in HOUSE.sources for line in NO_SUBJECT.findall(source.text)]
    assert not found, "\n".join(found)
    assert NO_SUBJECT.findall('def f():\n    """Of this, the rest."""\n    """Offers."""') == ['Of this, the rest."""']


def test_public_functions_have_docstrings_and_numbers_have_units():
    assert HOUSE.undocumented() == []
    assert HOUSE.bare_numbers() == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "holdfast serve" in (tmp_path / "reference" / "commands.html").read_text()
    assert "Generate" in (tmp_path / "search" / "search_index.json").read_text()


def test_the_tests_that_the_threat_model_names_exist():
    rows = re.findall(r"^\| .* \| ((?:`test_\w+`(?:, )?)+) \|$", TEXT["security.md"], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    assert len(rows) > 20
    assert all("`test_" in row for row in TEXT["security.md"].split("## Who may do what")[1].splitlines()[4:24])
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert named <= there, named - there
