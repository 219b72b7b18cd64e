"""Build step of the package: compiles the native executor's libraries. All else about the package is in pyproject.toml.
Without a compiler the package is built all the same: a worker on a CPU then compiles at its start, or is refused.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

FOLDER = Path("holdfast/worker/executors/cpu")


def compiler_driver() -> ModuleType:
    """`build.py` by itself: the package's dependencies are not there yet."""
    spec = importlib.util.spec_from_file_location("holdfast_compiler_driver", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(Command):
    """Puts CLASS.so of each instruction class beside the executor: into the wheel, or into an editable source tree."""

    description = "compile the native executor"
    user_options = [("build-lib=", "d", "where the package is put together")]  # noqa: RUF012
    build_lib: str
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = ""

    def finalize_options(self) -> None:
        self.build_lib = self.build_lib or self.get_finalized_command("build_py").build_lib

    @property
    def build_root(self) -> Path:
        return Path() if self.editable_mode else Path(self.build_lib)

    def run(self) -> None:
        driver = compiler_driver()
        kept, folder = FOLDER / "libraries", self.build_root / FOLDER / "libraries"
        folder.mkdir(parents=True, exist_ok=True)
        for name in driver.CLASSES:
            if kept != folder and driver.is_current(kept / f"{name}.so"):
                shutil.copy(kept / f"{name}.so", folder)
        missing = [name for name in driver.CLASSES if not driver.is_current(folder / f"{name}.so")]
        try:
            driver.compile_libraries(folder, missing)
        except driver.NoCompilerError as error:
            print(f"the native executor is left out: {error}", file=sys.stderr)

    def get_source_files(self) -> list[str]:
        return sorted(str(path) for path in (FOLDER / "native").iterdir())

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else sorted(map(str, (self.build_root / FOLDER / "libraries").glob("*.so")))

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformDistribution(Distribution):
    """Its files depend on the machine's kind, though no Python extension is among them."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """One wheel for all versions of Python: the libraries are loaded by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class Build(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012


setup(
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": PlatformWheel},
)
