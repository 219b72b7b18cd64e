"""A checkpoint's own next-token layer drafts what its formula says, and changes no token."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.worker.config import SpeculationConfig, WorkerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.next_token import NextTokenLayer, coarse_head
from holdfast.worker.request import EngineRequest
from holdfast.worker.step_plan import Drafting, ScheduledSequence, StepPlan
from tests.parity.families import randomize, save_tiny_model
from tests.parity.harness import BLOCK_SIZE, GREEDY, hugging_face, load, on_ranks, worker_config
from tests.parity.hybrids import Said, request, run_all, save_hybrid, scheduler_of, start, told_alone

BUNDLED = Path(__file__).parents[2] / "cluster" / "bundled_model" / "model" / "tokenizer.json"
PATTERNS = ("dense", "mixture", "by key heads, mixture", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
NAMES = {
    "mtp": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
    "glm": ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""),
}


class Parts(torch.nn.Module):
    """The layer, of Hugging Face's modules: it has none of its own for it."""

    def __init__(self, model: Any, is_behind: bool) -> None:
        super().__init__()
        self.model, layers, hidden = model.model, model.model.layers, model.config.hidden_size
        kinds = getattr(model.config, "layer_types", None)
        index = len(layers) - 1 if is_behind else kinds.index("full_attention")
        norm = type(model.model.norm)
        self.layer = type(layers[index])(model.config, index)
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.norms = torch.nn.ModuleList(norm(hidden, eps=model.config.rms_norm_eps) for _ in range(3))
        del self.model
        randomize(self, seed=3)
        self.requires_grad_(False)

    def tensors(self, is_behind: bool, num_layers: int) -> dict[str, Tensor]:
        """By the names of checkpoints."""
        base = f"model.layers.{num_layers}." if is_behind else "mtp."
        fc, *norms, layer = NAMES["glm" if is_behind else "mtp"]
        own = {f"{base}{fc}.weight": self.fc.weight}
        own |= {f"{base}{name}.weight": norm.weight for name, norm in zip(norms, self.norms, strict=True)}
        return own | {f"{base}{layer}{name}": tensor for name, tensor in self.layer.state_dict().items()}

    def drafts(self, model: Any, ids: Sequence[int], count: int) -> list[int]:
        """Greedy guesses at what follows all but the last of these tokens' successor."""
        tokens = torch.tensor([ids])
        hidden = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]
        behind, following, drafts = hidden, tokens[:, 1:], list[int]()
        for _ in range(count):
            embedded = model.get_input_embeddings()(following)
            x = self.fc(torch.cat((self.norms[0](embedded), self.norms[1](behind)), -1))
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
            rotary = model.model.rotary_emb
            has_three = hasattr(rotary, "mrope_section")  # text, height and width, which are equal for text
            angles = rotary(x, positions.expand(3, *positions.shape) if has_three else positions)
            y = self.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
            y = self.norms[2](y[0] if isinstance(y, tuple) else y)
            drafts.append(int(model.lm_head(y)[0, -1].argmax()))
            behind = torch.cat((behind, y[:, -1:]), 1)
            following = torch.cat((following, torch.tensor([drafts[-1:]])), 1)
        return drafts


def add_layer(folder: Path, parts: Parts, is_behind: bool, num_layers: int) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name: one.contiguous() for name, one in parts.tensors(is_behind, num_layers).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def configured(folder: Path, size: int = 1) -> WorkerConfig:
    return worker_config(folder, size).model_copy(update={"speculation": SpeculationConfig(speculative="mtp")})


@pytest.fixture(scope="module", params=PATTERNS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Parts]:
    folder, is_behind = tmp_path_factory.mktemp("model"), request.param.startswith(("glm", "deepseek"))
    save_tiny_model(request.param, folder) if is_behind else save_hybrid(folder, request.param)
    model = hugging_face(folder)
    parts = Parts(model, is_behind)
    add_layer(folder, parts, is_behind, model.config.num_hidden_layers)
    return folder, model, parts


def test_it_drafts_what_its_formula_says(made, prompts):
    folder, model, parts = made
    leader = load(configured(folder))
    draft = leader._runner.draft
    assert isinstance(draft, NextTokenLayer)
    for prompt in prompts:
        for cut in (len(prompt) - 1, 5):  # what the model has read in one step, or in several
            assert drafts_of(leader, draft, prompt, cut) == parts.drafts(model, prompt, 3)


def drafts_of(leader: LeaderRunner, draft: NextTokenLayer, prompt: Sequence[int], cut: int) -> list[int]:
    """The drafts behind a prompt of which all but the last token are computed, `cut` of them at a time."""
    done, read = 0, 0

    def share(count: int, num_drafts: int) -> ScheduledSequence:
        reading = Drafting(first_position=read, token_ids=tuple(prompt[read : done + 1]), num_drafts=num_drafts)
        return ScheduledSequence(
            sequence_id=cut,
            first_position=done,
            token_ids=tuple(prompt[done : done + count]),
            block_ids=tuple(range(-(-(done + count + num_drafts) // BLOCK_SIZE))),
            draw=GREEDY,
            num_draws=1,
            drafting=reading,
            state_slot=0 if leader._runner.info.num_state_slots else None,
        )

    while done < len(prompt) - 1:
        count = min(cut, len(prompt) - 1 - done)
        plan = StepPlan(step_id=0, others=(share(count, 0),))
        draft.guess(plan)
        leader.logits(plan)
        draft.take(plan)
        read, done = done + 1, done + count
    (drafts,) = draft.guess(StepPlan(step_id=0, others=(share(1, 3),)))
    return list(drafts)


# --- what it changes: nothing but the number of steps ---

NUM_NEW = 24


def scheduler(leader: LeaderRunner, **values: Any) -> Any:
    if leader._runner._config.speculation.speculative == "mtp":
        values["speculation"] = leader._runner._config.speculation
    return scheduler_of(leader, **values)


@pytest.fixture(scope="module")
def requests(prompts) -> list[EngineRequest]:
    return [request(str(number), prompt, NUM_NEW) for number, prompt in enumerate([*prompts, prompts[0][:40]])]


@pytest.fixture(scope="module")
def alone(made, requests) -> Said:
    """Without drafts and company."""
    leader = load(worker_config(made[0]))
    return told_alone(leader, requests)


@pytest.mark.in_turn
@pytest.mark.parametrize("values", [{}, {"max_num_batched_tokens": 8}, {"num_state_slots": 2}, {"max_num_seqs": 1}])
def test_requests_are_told_the_same(values, made, requests, alone):
    leader = load(configured(made[0]))
    if not leader._runner.info.num_state_slots:
        values = {name: value for name, value in values.items() if name != "num_state_slots"}
    ours = scheduler(leader, **values)
    for _ in range(2):  # then from the prefix cache
        assert run_all(ours, leader, requests) == alone
        assert ours.stats().num_draft_tokens > 0


@pytest.mark.parametrize(
    "made",
    [name if name in ("mixture", "deepseek_v3") else pytest.param(name, marks=pytest.mark.slow) for name in PATTERNS],
    indirect=True,
)
def test_on_two_ranks_requests_are_told_the_same(made, requests, alone):
    assert on_ranks(configured(made[0], 2), lambda leader: run_all(scheduler(leader), leader, requests)) == alone


# --- the head that it guesses with ---


def test_a_coarse_head_has_nearly_the_numbers_of_the_head():
    weight = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    coarse = coarse_head(weight)
    assert coarse is not None
    (units,) = coarse.units
    assert units.unit_form is not None
    assert units.unit_form.bits == 4
    numbers = units.to(torch.float32)
    assert (numbers - weight.float()).square().mean() < 0.008 * weight.float().square().mean()


@pytest.mark.parametrize("weight", [torch.zeros(64, 64), torch.zeros(64, 48, dtype=torch.bfloat16)])
def test_a_head_in_float32_or_of_no_whole_groups_stays(weight):
    assert coarse_head(weight) is None


@pytest.mark.parametrize("size", [1, 2])
def test_in_bfloat16_it_guesses_with_a_head_in_4_bits_and_changes_no_token(size, tmp_path, requests):
    folder = save_hybrid(tmp_path, "dense", torch.bfloat16)
    add_layer(folder, Parts(hugging_face(folder), is_behind=False), is_behind=False, num_layers=0)
    plain = load(worker_config(folder))
    expected = run_all(scheduler(plain), plain, requests)

    def said(leader: LeaderRunner) -> Said:
        draft = leader._runner.draft
        assert isinstance(draft, NextTokenLayer)
        assert draft._executor.packed.model.head.units.bits == 4
        ours = scheduler(leader)
        told = run_all(ours, leader, requests)
        assert ours.stats().num_draft_tokens > 0
        return told

    assert on_ranks(configured(folder, size), said) == expected


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token depends on little but the one before it, and the layer knows that."""
    folder = save_hybrid(tmp_path_factory.mktemp("model"), "dense")
    model = hugging_face(folder)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensor *= 0.02
    model.save_pretrained(folder)
    parts = Parts(model, is_behind=False)
    hidden = model.config.hidden_size
    parts.fc.weight.copy_(torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1))
    parts.norms[0].weight.zero_()
    for name, tensor in parts.layer.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.02
    parts.norms[2].weight.copy_(model.model.norm.weight)
    add_layer(folder, parts, is_behind=False, num_layers=0)
    return folder


def test_a_layer_that_guesses_well_saves_steps(predictable, requests):
    steps = {}
    for name, config in {"with": configured(predictable), "without": worker_config(predictable)}.items():
        leader = load(config)
        ours = scheduler(leader)
        said = start(ours, leader, requests[:1], num_steps=1)
        count = 1
        while ours.stats().num_running:
            for key, more in start(ours, leader, [], num_steps=1).items():
                said[key] += more
            count += 1
        steps[name] = (count, dict(said))
        if name == "with":
            stats = ours.stats()
            assert stats.num_accepted_tokens > 0.6 * stats.num_draft_tokens > 0
    assert steps["with"][1] == steps["without"][1]
    assert steps["with"][0] < 0.6 * steps["without"][0]


def test_files_without_such_a_layer_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"mtp.*no next-token layer to draft with.*mtp\.fc.* is missing"):
        load(configured(save_hybrid(tmp_path, "dense")))


def test_families_without_such_layers_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"mtp.*model type llama has no supported next-token"):
        load(configured(save_tiny_model("llama", tmp_path)))


def test_other_weights_come_with_their_own_layer(predictable, tmp_path, requests):
    """It shares the head's memory with the model."""
    other = save_hybrid(tmp_path, "dense")
    shutil.copy(BUNDLED, predictable)
    parts = Parts(hugging_face(other), is_behind=False)
    add_layer(other, parts, is_behind=False, num_layers=0)
    plain = load(worker_config(other))
    expected = run_all(scheduler(plain), plain, requests)
    leader = load(configured(predictable))
    run_all(scheduler(leader), leader, requests)
    leader.reload(str(other), "second")
    ours = scheduler(leader)
    assert run_all(ours, leader, requests) == expected
    assert ours.stats().num_draft_tokens > 0
