"""Catalogue of the commands that operate a running cluster, and of subcommands: the second half of `catalogue.py`."""

from typing import Final

from holdfast.cluster.commands.command import OPERATIONS, Command

_KEY_FILE: Final = (
    "API keys are a file that the routers read, and no key is sent over the network: run the command on the machine "
    "with that file, or write the file here with --file and copy it (to a Kubernetes secret, say)"
)
_RAY_NODE: Final = "it drains the Ray node of the machine it runs on: run it there (`kubectl exec`, or a preStop hook)"

OPERATING: Final = (
    Command(
        name="drain-node",
        target="admin:drain_node",
        help="Drain this machine's Ray node: end its routers and replicas gracefully.",
        details="For a pod or machine that is about to end. Ray Serve starts replacements on other nodes first.",
        examples=("drain-node", "drain-node --notice-s 60 --limit-s 900"),
        local=_RAY_NODE,
    ),
    Command(
        name="drain",
        target="admin:drain",
        help="Take a replica out of service.",
        details="The replica gets no new requests; its running requests move to other replicas, or finish.",
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
        name="pins",
        target="admin:pins",
        help="List the pinned prefixes: prompts that requests asked to keep cached (cache_ttl_s).",
        details="Each line has the tenant, the replica and the remaining time of a pin.",
        examples=("pins", "pins --server cluster.example:50051"),
        group=OPERATIONS,
    ),
    Command(
        name="unpin",
        target="admin:unpin",
        help="End a tenant's pins before their time is up.",
        details="On all replicas, in memory and on the disk tier. The blocks stay cached, and are evicted like others.",
        examples=(
            "unpin alice",
            "unpin alice --prefix 5f1d0c3a9b7e42648fd1a6b05c9e3d27 --server cluster.example:50051",
        ),
        group=OPERATIONS,
        takes="TENANT",
    ),
    Command(
        name="log-level",
        target="admin:log_level",
        help="Set the log level of routers and replicas.",
        details="Applies to routers and to each replica's leader. Ranks keep their level.",
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
        details="For replicas that do not serve yet: the phase of their start, such as loading weights.",
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
        target="models:update",
        help="Replace a model by another version, replica by replica, without ending a stream.",
        details=(
            "The given settings change; all others keep the values with which the model runs. Streams that have begun "
            "finish on the old version. A stream that still runs drain_timeout_s after the last old replica began to "
            "drain ends with an error."
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
        target="models:rollback",
        help="Undo an update that was interrupted: the older version serves alone again.",
        examples=("models rollback chat", "models rollback chat --server cluster.example:50051"),
        takes="NAME",
    ),
    Command(
        name="models add-adapter",
        target="admin:add_adapter",
        help="Add a LoRA adapter to a model of a running cluster, as a model name.",
        details=(
            "A replica first loads the adapter and computes a token with it. An adapter with tensors that the model "
            "cannot apply is refused, and nothing changes. Routers and replicas read the folder from the same path."
        ),
        examples=(
            "models add-adapter sql ./adapters/sql",
            "models add-adapter sql /adapters/sql-2 --replace --server cluster.example:50051",
        ),
        takes="NAME PATH",
    ),
    Command(
        name="models remove-adapter",
        target="admin:remove_adapter",
        help="Remove a LoRA adapter from a running cluster.",
        examples=("models remove-adapter sql", "models remove-adapter sql --server cluster.example:50051"),
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
        details="The key is not shown again: the file stores only its hash.",
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
