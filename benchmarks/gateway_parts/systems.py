"""What streams may pass through, as processes to be measured. Each has an address, and says what CPU it has taken."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.router_parts.part import Part

BARE = "bare grpc.aio server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """What is compared besides the router."""

    haproxy: str = ""
    nginx: str = ""
    with_serve: bool = True

    @property
    def proxies(self) -> dict[str, str]:
        return {kind: path for kind, path in (("haproxy", self.haproxy), ("nginx", self.nginx)) if path}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of them, and a client of it."""

    name: str
    client: Part
    cpu: Callable[[], dict[str, float]] = field(repr=False)
    """CPU seconds so far of each of its processes that are measured, by their names."""


class Systems:
    """Processes that end with this context."""

    def __init__(self, client_module: str, *client_arguments: str) -> None:
        self._client = (client_module, client_arguments)
        self._stack = ExitStack()
        self.all: list[System] = []

    def __enter__(self) -> "Systems":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[System]:
        return iter(self.all)

    def start(self, module: str, *arguments: str) -> Part:
        return self._stack.enter_context(Part(module, *arguments))

    def add(self, name: str, address: str, cpu: Callable[[], dict[str, float]]) -> None:
        """A system at an address, and a client for it."""
        module, arguments = self._client
        before = ("counting",) if module == "clients" else ()
        self.all.append(System(name=name, client=self.start(module, *before, address, *arguments), cpu=cpu))

    def add_bare(self, pace: str, tokens: int) -> Part:
        bare = self.start("bare_server", pace, str(tokens))
        self.add(BARE, bare.address, lambda: {BARE: bare.cpu_s()})
        return bare

    def add_router(self, replicas: Part, name: str = "router") -> Part:
        router = self.start("served_router", replicas.address)
        self.add(name, router.address, lambda: {name: router.cpu_s()})
        return router

    def add_proxies(self, programs: Programs, bare: Part, num_servers: int = 1, suffix: str = "") -> None:
        for kind, program in programs.proxies.items():
            proxy, name = self.start("proxy", kind, program, bare.address, "--servers", str(num_servers)), kind + suffix
            self.add(name, proxy.address, lambda proxy=proxy, name=name: {name: proxy.order("cpu")["proxy"]})  # type: ignore[misc]

    def add_serve(self, pace: str) -> None:
        serve = self.start("proxied_server", pace)

        def cpu() -> dict[str, float]:
            each = serve.order("cpu")
            return {"Serve's proxy": each["proxy"], "Serve's proxy and deployment": each["proxy"] + each["replica"]}

        self.add("Serve's proxy", serve.address, cpu)
