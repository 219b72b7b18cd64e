"""Catalogue of the commands: names, help texts, examples, and why a command works on its own machine alone.

It is read for every `--help` and every completion, so it imports nothing of the commands themselves.
"""

from dataclasses import dataclass
from typing import Final

ESSENTIALS: Final = "Essentials"
OPERATIONS: Final = "Operations"
MORE: Final = "More"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command or subcommand of `holdfast`."""

    name: str
    """As typed: `serve`, `models add`."""
    target: str
    """`module:function`, the module below `holdfast.cluster.commands`."""
    help: str
    """One line, for the list of commands; the function's docstring says more."""
    examples: tuple[str, ...]
    """Command lines without the word `holdfast`."""
    details: str = ""
    """What its own help says after that line."""
    group: str = MORE
    takes: str = ""
    """What it takes besides options, as its usage line shows it."""
    has_options: bool = True
    local: str = ""
    """Why it has no `--server`; empty: it has one."""

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.name.split())

    @property
    def usage(self) -> str:
        """The first line of the command's help. Written here, since cyclopts reads all settings again to derive it."""
        options = "[OPTIONS]" if self.has_options else ""
        return " ".join(filter(None, ("Usage: holdfast", self.name, options, self.takes))) + "\n"

    @property
    def description(self) -> str:
        """The text of the command's own help; a list of commands shows the first paragraph of it."""
        return "\n\n".join(filter(None, (self.help, self.details)))

    @property
    def epilogue(self) -> str:
        """The examples, as the end of the command's help."""
        return examples_text(self.examples)


def examples_text(examples: tuple[str, ...]) -> str:
    lines = "".join(f"  holdfast {example}\n" for example in examples)
    return f"Example{'s' if len(examples) > 1 else ''}:\n\n{lines}"


EXAMPLES: Final = (
    'generate "The capital of France is"',
    "serve --replicas 2 --tp 2",
    'generate --server localhost:50051 "The capital of France is"',
    "config show --config serve.yaml",
)
"""Of `holdfast --help`."""

GROUPS: Final = {
    "models": "List the models of a running cluster; add, update and remove them.",
    "keys": "Create API keys, list and revoke them.",
    "config": "Show the settings.",
}
"""Commands that consist of subcommands, with their help."""

_KEY_FILE: Final = (
    "API keys are a file that the routers read, and a key never travels: run it where that file is written, or write "
    "the file (a Kubernetes secret, say) from here with --file"
)
_RAY_NODE: Final = "it drains the Ray node of the machine it runs on: run it there (`kubectl exec`, or a preStop hook)"

COMMANDS: Final = (
    Command(
        name="serve",
        target="serve:serve",
        help="Start a cluster, or join one, and serve models over gRPC and HTTP.",
        details=(
            "Runs until Ctrl-C. On SIGINT and SIGTERM, open requests get drain_timeout_s to finish; a second "
            "signal ends them at once."
        ),
        examples=("serve", "serve ./my-model --replicas 2 --tp 2", "serve --config serve.yaml --host 0.0.0.0"),
        group=ESSENTIALS,
        takes="[MODEL]",
        local="it starts processes: run it on the machine that serves, or on one that can reach the Ray at --address",
    ),
    Command(
        name="generate",
        target="generate:generate",
        help="Complete a prompt, in this process or on a server.",
        examples=(
            'generate "The capital of France is"',
            'generate --server localhost:50051 --chat "What is 2 plus 3?"',
            'generate --n 3 --temperature 0.8 --max-tokens 32 "Once upon a time"',
        ),
        group=ESSENTIALS,
        takes="PROMPT",
    ),
    Command(
        name="demo",
        target="demo:demo",
        help="Start a local cluster, stream four prompts at once, and stop it.",
        details=(
            "Prints throughput and latency, then stops the cluster. With --blackout every process is killed "
            "during the streams; with --page a web page shows the replicas and can kill them."
        ),
        examples=("demo", "demo --blackout", "demo --page"),
        group=ESSENTIALS,
        local="it starts its own cluster on this machine",
    ),
    Command(
        name="apply",
        target="apply:apply",
        help="Show how a running cluster's models differ from a configuration, and change them.",
        details=(
            "Adds, updates (replica by replica, without ending a stream), scales and removes models, and replaces "
            "routers one after the other. Addresses and security need a restart: differences there are printed "
            "and left alone. With --server, routers are not replaced: the call would end with the router that "
            "carries it."
        ),
        examples=(
            "apply serve.yaml --dry-run",
            "apply serve.yaml --yes",
            "apply serve.yaml --yes --server cluster.example:50051",
        ),
        takes="CONFIG",
    ),
    Command(
        name="bench",
        target="bench:bench",
        help="Load a Holdfast, OpenAI-compatible or Open Inference server, and report what its clients see.",
        details=(
            "TTFT and end-to-end latency count from the time a request was due; TPOT is that of the tokens after "
            "the first."
        ),
        examples=(
            "bench --concurrency 1,8,32",
            "bench --server http://localhost:8000 --protocol chat --rate 4 --html page.html",
            "bench --find-max --slo ttft=500ms,tpot=50ms",
        ),
    ),
    Command(
        name="chat",
        target="chat:chat",
        help="Chat with a model in the terminal, in this process or on a server.",
        details=(
            "Each message is sent with the whole conversation. Lines from a pipe are messages, one each. Type "
            "/help for commands. Answers have at most 512 tokens unless --max-tokens is given."
        ),
        examples=("chat --model ./my-model", 'chat --server localhost:50051 --system "Answer in one sentence."'),
        group=ESSENTIALS,
    ),
    Command(
        name="status",
        target="status:status",
        help="Show whether a cluster is healthy: routers, models, replicas, load and caches.",
        details="Exit code 0: all routers answer, and every model has a replica; 1 otherwise.",
        examples=("status", "status --server router-0:50051,router-1:50051 --watch"),
        group=ESSENTIALS,
    ),
    Command(
        name="logs",
        target="logs:logs",
        help="Show the logs of a cluster's routers and replicas.",
        details=(
            "In order of time. Without --server: logs of this machine, of the running cluster or, if none runs, "
            "of the last one. With --server: logs of the router's machine; on several machines, ask a router on "
            "each."
        ),
        examples=("logs --follow", "logs router --lines 50", "logs replica --server cluster.example:50051"),
        takes="[PROCESS]",
    ),
    Command(
        name="doctor",
        target="doctor:doctor",
        help="Check this machine and these settings, and say what to do about each finding.",
        details=(
            "Checks versions, devices, memory, ports, the model's files and tokenizer, the memory plan, and "
            "whether a token's bits depend on its batch here. Takes the flags of `serve`. Exit code 0: nothing is "
            "bad."
        ),
        examples=("doctor --quick", "doctor --model ./my-model --tp 2"),
        local="it examines the hardware, files and ports of the machine it runs on: run it there",
    ),
    Command(
        name="front",
        target="front:front",
        help="Serve one HTTP address before several routers; streams survive the loss of a router.",
        details=(
            "A stream whose router is lost continues at another router, with any client. API keys are checked by "
            "the routers, which get the clients' headers."
        ),
        examples=("front --routers 127.0.0.1:8000,127.0.0.1:8001 --port 8080",),
        local="it is a server itself; --routers names the routers, on any machine",
    ),
    Command(
        name="completion",
        target="completion:completion",
        help="Print the script with which a shell completes commands and flags.",
        details=(
            "bash: holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast; zsh: into a "
            "file _holdfast in a folder of $fpath; fish: into ~/.config/fish/completions/holdfast.fish"
        ),
        examples=("completion bash", "completion fish"),
        takes="SHELL",
        has_options=False,
        local="it writes a script for the shell of this machine",
    ),
    Command(
        name="stats",
        target="stats:stats",
        help="Show the load and the KV cache of each replica of a running cluster.",
        details=(
            "Blocks are used by requests, or free; cached blocks are free and still hold a prefix; wasted are the "
            "slots of used blocks that hold no token. Shared: prompt tokens that several completions of one "
            "request have in common. Drafts: share of draft tokens that were accepted. Counters start with the "
            "replica; tokens/s are output tokens per second of stepping. A dash: no value yet."
        ),
        examples=("stats", "stats --server cluster.example:50051"),
    ),
    Command(
        name="simulate",
        target="simulate:simulate",
        help="Run the routing and scheduling code in virtual time under faults, and check every token.",
        details=(
            "The same seed always gives the same simulation; exit code 1 if a promise was broken. With --replicas "
            "no fault is injected: a load is served, and what its clients would see is printed for each routing "
            "policy."
        ),
        examples=("simulate --seeds 0:100", "simulate --replay 7"),
        local="it runs in this process and needs no cluster",
    ),
    Command(
        name="estimate",
        target="estimate:estimate",
        help="Print how much memory a model needs, without loading it.",
        details=(
            "Figures are per rank. Unless a setting of the KV cache is given, its size is the one that this "
            "machine would use."
        ),
        examples=("estimate ./my-model --tp 2", "estimate ./my-model --device h100"),
        takes="[MODEL]",
        local="it reads the model's config.json, which may lie on this machine alone; no cluster is needed",
    ),
    Command(
        name="evaluate",
        target="evaluate:evaluate",
        help="Measure a model's perplexity on a text, and how far it is from a reference.",
        details=(
            "Log-probabilities are those that are served as prompt_logprobs. With --reference: the Kullback-Leibler "
            "divergence, and how often both find the same token likeliest."
        ),
        examples=(
            "evaluate ./my-model --text book.txt",
            "evaluate ./my-model --quantization int4 --reference ./my-model --text book.txt --json",
        ),
        takes="[MODEL]",
        local="it loads the models in this process",
    ),
    Command(
        name="quantize",
        target="quantize:quantize",
        help="Quantize a plain checkpoint into a new folder in compressed-tensors.",
        details=(
            "vLLM loads the folder as well. Serving it gives the bits of serving the checkpoint with --quantization. "
            "It appears when it is complete."
        ),
        examples=("quantize ./my-model ./my-model-int4", "quantize ./my-model ./my-model-fp8 --scheme fp8"),
        takes="IN OUT",
        local="it reads and writes folders of the machine it runs on, and no cluster is needed",
    ),
    Command(
        name="drain-node",
        target="drain_node:drain_node",
        help="Drain this machine's Ray node: end its routers and replicas gracefully.",
        details="For a pod or machine that is about to end. Ray Serve starts replacements on other nodes first.",
        examples=("drain-node", "drain-node --notice-s 60 --limit-s 900"),
        local=_RAY_NODE,
    ),
    Command(
        name="drain",
        target="admin:drain",
        help="Take a replica out of service.",
        details="It gets no new requests; its running requests move to other replicas, or finish.",
        examples=("drain r0", "drain r0 --server cluster.example:50051"),
        group=OPERATIONS,
        takes="REPLICA",
    ),
    Command(
        name="undrain",
        target="admin:undrain",
        help="Put a drained replica back into service.",
        examples=("undrain r0", "undrain r0 --server cluster.example:50051"),
        group=OPERATIONS,
        takes="REPLICA",
    ),
    Command(
        name="pause",
        target="admin:pause",
        help="Hold back new requests for a model, or refuse them.",
        details=("New requests wait, within their own deadlines, until `holdfast resume`; running requests continue."),
        examples=("pause demo", "pause demo --refuse --server cluster.example:50051"),
        group=OPERATIONS,
        takes="MODEL",
    ),
    Command(
        name="resume",
        target="admin:resume",
        help="End the pause of a model.",
        examples=("resume demo", "resume demo --server cluster.example:50051"),
        group=OPERATIONS,
        takes="MODEL",
    ),
    Command(
        name="log-level",
        target="admin:log_level",
        help="Set the log level of routers and replicas.",
        details=(
            "The level of routers and of each replica's leader: DEBUG, INFO, WARNING or ERROR. Ranks keep theirs."
        ),
        examples=("log-level debug", "log-level warning --server cluster.example:50051"),
        group=OPERATIONS,
        takes="LEVEL",
    ),
    Command(
        name="dump",
        target="admin:dump",
        help="Write the state of the routers as JSON, for a bug report.",
        details="Models, replicas, queues, versions, settings and recent errors; no keys, prompts or outputs.",
        examples=("dump --output state.json", "dump --server router-0:50051,router-1:50051"),
        group=OPERATIONS,
    ),
    Command(
        name="models list",
        target="models:show",
        help="List the models of a running cluster, with state, replicas and versions.",
        details=("State and number of replicas of each model; of replicas that do not serve yet, what they are doing."),
        examples=("models list", "models list --server cluster.example:50051"),
    ),
    Command(
        name="models add",
        target="models:add",
        help="Add a model to a running cluster, and wait until its replicas serve.",
        details=(
            "Without --server, the cluster is that of `holdfast serve` on this machine, or the one on the Ray at "
            "--address. With --server, a router adds the model; paths are then those of the cluster's machines. "
            "If the replicas cannot start, the model is removed again."
        ),
        examples=(
            "models add ./draft --served-model-name draft --tp 2",
            "models add org/draft --replicas 2 --server cluster.example:50051",
        ),
        takes="MODEL",
    ),
    Command(
        name="models update",
        target="updates:update",
        help="Replace a model by another version, replica by replica, without ending a stream.",
        details=(
            "The given settings change; all others stay as the model runs now. Streams that have begun finish on "
            "the old version; streams that have not finished drain_timeout_s after its last replica began to "
            "drain end with an error."
        ),
        examples=(
            "models update chat --model ./chat-v2",
            "models update chat --model ./chat-v2 --canary 0.1 --canary-for 120",
            "models update chat --max-num-seqs 128 --server cluster.example:50051",
        ),
        takes="NAME",
    ),
    Command(
        name="models rollback",
        target="updates:rollback",
        help="Undo an update that was interrupted: the older version serves alone again.",
        examples=("models rollback chat", "models rollback chat --server cluster.example:50051"),
        takes="NAME",
    ),
    Command(
        name="models remove",
        target="models:remove",
        help="Remove a model from a running cluster, and wait until its replicas have ended.",
        details=(
            "New requests for it are refused at once; running requests may finish within the drain_timeout_s that "
            "the model was started with."
        ),
        examples=("models remove draft", "models remove draft --server cluster.example:50051"),
        takes="NAME",
    ),
    Command(
        name="config show",
        target="config_show:show",
        help="Print every setting's value and where it came from.",
        details="Later sources win: defaults, the file, the environment (HOLDFAST_SECTION__KEY), flags.",
        examples=("config show --config serve.yaml", "config show --tp 2"),
        local="it shows the settings that a command on this machine would read; `holdfast dump` has those of a router",
    ),
    Command(
        name="keys add",
        target="keys:add",
        help="Create an API key and print it, once.",
        details="The key is shown this once: the file has only its hash.",
        examples=("keys add alice --models demo --requests-per-minute 60", "keys add ops --operator --file keys.json"),
        takes="NAME",
        local=_KEY_FILE,
    ),
    Command(
        name="keys list",
        target="keys:show",
        help="List the API keys and their rights.",
        examples=("keys list", "keys list --file keys.json"),
        local=_KEY_FILE,
    ),
    Command(
        name="keys revoke",
        target="keys:revoke",
        help="Revoke an API key.",
        details="Routers refuse it within two seconds; running requests may finish.",
        examples=("keys revoke alice", "keys revoke alice --file keys.json"),
        takes="NAME",
        local=_KEY_FILE,
    ),
)


def of_words(arguments: tuple[str, ...]) -> Command | None:
    """The command that a command line begins with; None where it begins with none."""
    return next((one for one in COMMANDS if arguments[: len(one.words)] == one.words), None)
