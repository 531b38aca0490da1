"""Every CI job as a session: `nox -s unit`. `make test` runs the same checks in the one environment `.venv`."""

from __future__ import annotations

import pathlib

import nox

nox.options.sessions = ["lint", "types", "floors", "unit", "contract", "numerics", "gpu", "runtimes", "docs"]
nox.options.reuse_existing_virtualenvs = True

THREADS = {"OMP_NUM_THREADS": "1"}


def install(session: nox.Session) -> None:
    """The pinned set and the package itself, editable."""
    session.install("-r", "requirements/dev.txt")
    session.install("--no-build-isolation", "--no-deps", "-e", ".")


def run_tests(session: nox.Session, *folders: str) -> None:
    """pytest on `folders`, with what follows `--` on the command line."""
    install(session)
    session.run("python", "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *folders, *session.posargs, env=THREADS)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format of Python."""
    install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on the package as installed."""
    install(session)
    session.run("python", "tests/architecture/installed_layout.py", "types")


@nox.session
def floors(session: nox.Session) -> None:
    """Imports go down only, and the tests about the project itself."""
    install(session)
    session.run("python", "tests/architecture/installed_layout.py", "floors")
    session.run("python", "-m", "pytest", "-q", "tests/architecture", env=THREADS)


@nox.session
def unit(session: nox.Session) -> None:
    """One part at a time."""
    run_tests(
        session,
        "tests/unit",
        "tests/hostile",
        "tests/graph",
        "tests/foreign",
        "tests/export",
        "tests/runtime",
        "tests/native",
        "tests/cli",
        "tests/examples",
        "tests/serving",
    )


@nox.session
def contract(session: nox.Session) -> None:
    """One meaning, many implementations: they agree."""
    run_tests(session, "tests/contract", "tests/golden", "tests/compatibility")


@nox.session
def numerics(session: nox.Session) -> None:
    """Error budgets in every type, and the mutation check."""
    run_tests(session, "tests/numerics", "tests/validation_mutants")


@nox.session
def gpu(session: nox.Session) -> None:
    """The CUDA kernels, without a GPU: interpreted, compiled, and launched over a stand-in driver."""
    run_tests(session, "tests/gpu")


@nox.session
def runtimes(session: nox.Session) -> None:
    """Files in other runtimes; each has an environment of its own below build/runtimes/."""
    run_tests(session, "tests/runtimes")


@nox.session
def docs(session: nox.Session) -> None:
    """Generated files and tables equal what the code says."""
    install(session)
    session.run("python", "-m", "qknorm_onnx.spec.cpp_header", "--check")
    session.run("python", "-m", "tools.generate_docs", "--check")


@nox.session
def wheel(session: nox.Session) -> None:
    """A wheel builds, holds the right folders, and works outside the repository without torch and onnxruntime."""
    session.install("-r", "requirements/build.txt")
    folder = pathlib.Path(session.create_tmp()).resolve()
    session.run("python", "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), ".")
    session.install(*map(str, folder.glob("*.whl")))
    session.chdir(folder)
    session.run("qknorm-onnx", "--help")
