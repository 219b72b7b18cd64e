"""Catalogue of the commands: names, help texts, examples, and the reason where a command has no `--server`.

It is read for every `--help` and every completion, so it imports nothing of the commands themselves.
"""

from typing import Final

from holdfast.cluster.commands.command import ESSENTIALS, Command
from holdfast.cluster.commands.operating_commands import OPERATING

EXAMPLES: Final = (
    'generate "The capital of France is"',
    "serve --replicas 2 --tp 2",
    'generate --server localhost:50051 "The capital of France is"',
    "config show --config serve.yaml",
)
"""Examples shown by `holdfast --help`."""

GROUPS: Final = {
    "models": "List the models of a running cluster; add, update and remove them.",
    "keys": "Create API keys, list and revoke them.",
    "config": "Show the settings.",
}
"""Commands that consist of subcommands, with their help."""

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
        name="embed",
        target="embed:embed",
        help="Print the embeddings or the class scores of texts, from a pooling model.",
        details="Prints one line of JSON per text: its vector, or an object of labels and scores.",
        examples=(
            'embed --model ./Qwen3-Embedding-0.6B "A cat sat on the mat."',
            "embed - --server localhost:50051",
        ),
        takes="TEXT",
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
            "TTFT and end-to-end latency are measured from the time at which a request was due; TPOT is the time per "
            "token after the first."
        ),
        examples=(
            "bench --concurrency 1,8,32",
            "bench --server http://localhost:8000 --protocol chat --rate 4",
            "bench --find-max --slo ttft=500ms,tpot=50ms",
        ),
    ),
    Command(
        name="verify",
        target="verify:verify",
        help="Audit any OpenAI-compatible server from outside: determinism, API semantics, streams, numbers.",
        details=(
            "Sends the same requests in different ways (alone, again, in a batch, streamed, with a seed) and compares "
            "the answers. Findings have names, counts, a likely cause, and the request that shows "
            "them. Exit code 0: no findings."
        ),
        examples=(
            "verify http://localhost:8000",
            "verify http://localhost:8000 --html report.html --budget requests=300,rate=5",
            "verify https://models.example --key-file key --watch 10 --metrics-file verify.prom",
        ),
        takes="URL",
        local="it takes the server's URL as its argument",
    ),
    Command(
        name="run-batch",
        target="run_batch:run_batch",
        help="Compute the requests of a file, on a server or in this process, and write the answers.",
        details=(
            "Each line is a request in the format of OpenAI's batches: custom_id, method, url, body. After an "
            "interruption, the same command continues the batch. With --server, a server with --store computes the "
            "batch, also after this command has ended."
        ),
        examples=(
            "run-batch -i requests.jsonl -o answers.jsonl --model ./my-model",
            "run-batch -i requests.jsonl -o answers.jsonl --server http://localhost:8000",
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
            "Lines are sorted by time. Without --server: logs on this machine, of the running cluster or, if none "
            "runs, of the last one. With --server: logs on the router's machine; in a cluster of several machines, "
            "name a router on each."
        ),
        examples=("logs --follow", "logs router --lines 50", "logs replica --server cluster.example:50051"),
        takes="[PROCESS]",
    ),
    Command(
        name="doctor",
        target="doctor:doctor",
        help="Check this machine and these settings, and suggest a fix for each finding.",
        details=(
            "Checks versions, devices, memory, ports, the model's files and tokenizer, the memory plan, and "
            "whether a token's logits depend on its batch on this machine. Takes the flags of `serve`. Exit code 0: "
            "no finding is an error."
        ),
        examples=("doctor --quick", "doctor --model ./my-model --tp 2"),
        local="it examines hardware, files and ports: run it on the machine to be examined",
    ),
    Command(
        name="front",
        target="serve:front",
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
        target="cli:completion",
        help="Print a shell script that completes commands and flags.",
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
        target="status:stats",
        help="Show the load and the KV cache of each replica of a running cluster.",
        details=(
            "Used: KV blocks of running requests. Cached: free blocks that still hold a prefix. Wasted: slots of used "
            "blocks without a token. Shared: prompt tokens that several completions of one request have in common. "
            "Drafts: share of draft tokens that were accepted. Counters start with the replica; tokens/s are output "
            "tokens per second of step time. A dash: no value yet."
        ),
        examples=("stats", "stats --server cluster.example:50051"),
    ),
    Command(
        name="simulate",
        target="simulate:simulate",
        help="Run the routing and scheduling code in virtual time under faults, and check every token.",
        details=(
            "The same seed always gives the same simulation. Exit code 1: an invariant was violated. With --replicas, "
            "no faults are injected: a load is served, and its clients' latencies are printed for each routing policy."
        ),
        examples=("simulate --seeds 0:100", "simulate --replay 7"),
        local="it runs in this process and needs no cluster",
    ),
    Command(
        name="estimate",
        target="estimate:estimate",
        help="Print how much memory a model needs, without loading it.",
        details=("Figures are per rank. Without a setting for the KV cache, its size is this machine's default."),
        examples=("estimate ./my-model --tp 2", "estimate ./my-model --device h100"),
        takes="[MODEL]",
        local="it reads the model's config.json on this machine and needs no cluster",
    ),
    Command(
        name="evaluate",
        target="evaluate:evaluate",
        help="Measure a model's perplexity on a text, and how far it is from a reference.",
        details=(
            "Log-probabilities are the values of prompt_logprobs. With --reference: the Kullback-Leibler divergence, "
            "and the share of positions with the same most likely token."
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
        help="Quantize a checkpoint into a new folder in compressed-tensors' format.",
        details=(
            "vLLM loads the folder as well. Its outputs are bit for bit the outputs of the checkpoint served with "
            "--quantization. The folder appears when it is complete."
        ),
        examples=("quantize ./my-model ./my-model-int4", "quantize ./my-model ./my-model-fp8 --scheme fp8"),
        takes="IN OUT",
        local="it reads and writes folders on this machine and needs no cluster",
    ),
    *OPERATING,
)


def find_command(arguments: tuple[str, ...]) -> Command | None:
    """The command that a command line begins with; None if it begins with no command's name."""
    return next((one for one in COMMANDS if arguments[: len(one.words)] == one.words), None)
