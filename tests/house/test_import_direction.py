"""The house of the project: who may import whom. Imports inside functions count, too."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .checkout import ROOT

PLUGIN = "pytest_kvconform"
RIGS = f"{PLUGIN}.rigs"
HEAVY = ("torch", "vllm", "transformers", "nixl", "ray")

# The modules of the plugin: those that rigs may import, and the upper ones, which they may not.
LOWER = tuple("services result case_outcome extras kv_config subject kvspace rigs".split())
UPPER = tuple(
    f"{PLUGIN}.{name}"
    for name in """case plugin pytest_hooks settings declaration declarations apply_declaration features
                   plan loading rules verdict report cli doctor claims shards starter suite""".split()
)
LIGHT = (*UPPER, *(f"{PLUGIN}.{name}" for name in LOWER if name not in ("kvspace", "rigs")))

# Room of the rigs, or module beside the rooms -> rooms and modules of the rigs that it may import.
ROOMS = {
    "processes": "",
    "scenario": "",
    "missing": "",
    "tap": "",
    "context": "processes",
    "hook_calls": "",
    "history": "processes tap hook_calls vllm_setup",
    "launch": "processes vllm_setup",  # it starts the zygote, which loads modules of rooms by their names
    "vllm_setup": "processes context scenario",
    "probe_subject": "processes context scenario launch vllm_setup",
    "engine": "processes context scenario tap hook_calls history missing vllm_setup",
    "bytes": "processes context scenario tap history vllm_setup engine",
    "cluster": "processes context scenario history missing vllm_setup engine bytes",
    "canary": "processes context scenario vllm_setup engine",
    "scheduler": "processes context scenario tap hook_calls history missing vllm_setup engine bytes cluster",
    "serving": "processes context missing vllm_setup engine cluster canary",
    "services": "processes launch",
    "second_zygote": "processes launch",
    "nodes": "processes launch",
    "bench": "processes context scenario launch probe_subject vllm_setup engine bytes cluster scheduler "
    "serving nodes second_zygote",
}

# part of the house -> what it must not import, with all that lies below the name
FORBIDDEN: dict[str, tuple[str, ...]] = {
    f"{PLUGIN}": ("reference_connector", "tests"),
    RIGS: (*UPPER, "pytest"),
    f"{RIGS}.processes": HEAVY,
    **dict.fromkeys(LIGHT, HEAVY),
    # a case of the suite is registered, and may ask for the strength of its rule
    f"{PLUGIN}.suite": (*(set(UPPER) - {f"{PLUGIN}.{name}" for name in ("suite", "case", "rules")}), *HEAVY),
    "model_matrix": (PLUGIN, "reference_connector", "tests", "torch", "vllm"),
    "reference_connector": (PLUGIN, "model_matrix", "tests"),
    f"{PLUGIN}.kvspace.rows": (f"{PLUGIN}.kvspace.pools",),
    f"{PLUGIN}.kvspace.pools": (f"{PLUGIN}.kvspace.rows",),
    f"{PLUGIN}.kvspace.kinds": (f"{PLUGIN}.kvspace.rows", f"{PLUGIN}.kvspace.pools"),
}

# part of the house -> all that it may import besides itself and the standard library
ALLOWED: dict[str, tuple[str, ...]] = {f"{PLUGIN}.kvspace": ("numpy",)}

# part of the house -> all that may import it
IMPORTERS = {
    f"{RIGS}.launch": (
        *(f"{RIGS}.{name}" for name in ("bench", "probe_subject", "services", "nodes", "second_zygote")),
        f"{PLUGIN}.pytest_hooks",
    )
}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of the distribution."""
    for package in (PLUGIN, "model_matrix", "reference_connector"):
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imports(module: str, file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of a file, without those for type checkers."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from a import b` may load the module a.b
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def names_of_modules(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every string that is the name of a module of the plugin: children import it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and (found := re.fullmatch(rf"({PLUGIN}(?:\.\w+)+)(?::\w+)?", text)):
            yield node.lineno, found[1]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def below(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")


def wrong_imports(root: Path) -> list[str]:
    return [
        f"{file.relative_to(root)}:{line} imports {name}"
        for module, file in modules(root)
        for line, name in [*imports(module, file), *named_imports(module, file)]
        if is_wrong(module, name)
    ]


def named_imports(module: str, file: Path) -> list[tuple[int, str]]:
    """Modules of the rigs that a module of the rigs names for a child; `launch` may name all of them."""
    named = below(module, RIGS) and module != f"{RIGS}.launch"
    return [(line, name) for line, name in names_of_modules(file) if below(name, RIGS)] if named else []


def is_wrong(module: str, name: str) -> bool:
    """Whether a module must not import a name."""
    return (
        any(below(module, part) and below(name, ban) for part, bans in FORBIDDEN.items() for ban in bans)
        or any(
            below(module, part)
            and name.partition(".")[0] not in sys.stdlib_module_names
            and not any(below(name, one) for one in (part, *allowed))
            for part, allowed in ALLOWED.items()
        )
        or any(
            below(name, part) and not any(below(module, one) for one in (part, *importers))
            for part, importers in IMPORTERS.items()
        )
        or goes_up(module, name)
    )


def goes_up(module: str, name: str) -> bool:
    """Whether a room of the rigs imports a room that is not below it."""
    if not (below(module, RIGS) and below(name, RIGS)) or RIGS in (module, name):
        return False
    room, other = (dotted.removeprefix(f"{RIGS}.").partition(".")[0] for dotted in (module, name))
    return room != other and other in ROOMS and other not in ROOMS[room].split()


def test_every_import_goes_the_right_way() -> None:
    assert wrong_imports(ROOT) == []


def test_the_walk_sees_the_packages() -> None:
    found = {module.partition(".")[0] for module, _ in modules(ROOT)}
    assert {PLUGIN, "model_matrix", "reference_connector"} <= found


def test_every_module_has_its_place() -> None:
    """A new module of the plugin, or a new room of the rigs, must be added to the tables above."""
    inside = {module.removeprefix(f"{PLUGIN}.") for module, _ in modules(ROOT) if below(module, PLUGIN)}
    plugin = {name.partition(".")[0] for name in inside - {PLUGIN}}
    assert plugin == {*LOWER, *(name.removeprefix(f"{PLUGIN}.") for name in UPPER)}
    rigs = {name.removeprefix("rigs.").partition(".")[0] for name in inside if name.startswith("rigs.")}
    assert rigs == ROOMS.keys()


def test_the_arrows_between_rooms_have_no_circle() -> None:
    for room, lower in ROOMS.items():
        assert all(room not in ROOMS[other].split() for other in lower.split()), room


@pytest.mark.parametrize(
    ("file", "source", "finds"),
    [
        (f"{PLUGIN}/kvspace/fill.py", "import torch", "torch"),
        (f"{PLUGIN}/kvspace/fill.py", "from ..rigs import engine", f"{PLUGIN}.rigs.engine"),
        (f"{PLUGIN}/kvspace/fill.py", "import msgspec", "msgspec"),
        (f"{PLUGIN}/kvspace/__init__.py", "from .. import suite", f"{PLUGIN}.suite"),
        (f"{PLUGIN}/kvspace/rows/draw.py", "from ..pools import words", f"{PLUGIN}.kvspace.pools.words"),
        (f"{PLUGIN}/kvspace/pools/draw.py", "from ..rows.draw import x", f"{PLUGIN}.kvspace.rows.draw.x"),
        (f"{PLUGIN}/kvspace/kinds.py", "from .rows import draw", f"{PLUGIN}.kvspace.rows.draw"),
        (f"{PLUGIN}/rigs/bench.py", f"def f():\n    from {PLUGIN} import verdict", f"{PLUGIN}.verdict"),
        (f"{PLUGIN}/rigs/engine/handle.py", f"import {PLUGIN}.plan", f"{PLUGIN}.plan"),
        (f"{PLUGIN}/rigs/launch.py", f"from {PLUGIN}.case import X", f"{PLUGIN}.case.X"),
        (f"{PLUGIN}/rigs/x.py", f"import {PLUGIN}.apply_declaration", f"{PLUGIN}.apply_declaration"),
        (f"{PLUGIN}/rigs/launch.py", f"from {PLUGIN}.pytest_hooks import x", f"{PLUGIN}.pytest_hooks.x"),
        (
            f"{PLUGIN}/rigs/context.py",
            f"from {PLUGIN} import apply_declaration",
            f"{PLUGIN}.apply_declaration",
        ),
        (f"{PLUGIN}/rigs/cluster/peers/bench.py", f"from {PLUGIN} import loading", f"{PLUGIN}.loading"),
        (f"{PLUGIN}/rigs/processes/linux.py", "def f():\n    import vllm", "vllm"),
        (f"{PLUGIN}/rigs/processes/linux.py", "import torch.cuda", "torch.cuda"),
        (f"{PLUGIN}/rigs/processes/zygote.py", "from nixl._api import nixl_agent", "nixl._api.nixl_agent"),
        (f"{PLUGIN}/rigs/processes/child.py", "from ..context import Deadlines", f"{RIGS}.context.Deadlines"),
        (f"{PLUGIN}/rigs/processes/child.py", "from .. import vllm_setup", f"{RIGS}.vllm_setup"),
        (f"{PLUGIN}/rigs/processes/child.py", f"x = '{RIGS}.engine.process:serve'", f"{RIGS}.engine.process"),
        (f"{PLUGIN}/rigs/vllm_setup/hooks.py", "from ..engine.handle import x", f"{RIGS}.engine.handle.x"),
        (f"{PLUGIN}/rigs/engine/process.py", "from ..bytes import worker", f"{RIGS}.bytes.worker"),
        (
            f"{PLUGIN}/rigs/bytes/specs.py",
            "from ..cluster.loop import play",
            f"{RIGS}.cluster.loop.play",
        ),
        (f"{PLUGIN}/rigs/cluster/byte_bench.py", "from ..scheduler import rig", f"{RIGS}.scheduler.rig"),
        (f"{PLUGIN}/rigs/cluster/loop.py", "from ..scheduler.rig import x", f"{RIGS}.scheduler.rig.x"),
        (f"{PLUGIN}/rigs/scheduler/bench.py", "from ..canary.school import x", f"{RIGS}.canary.school.x"),
        (f"{PLUGIN}/rigs/scheduler/bench.py", "from ..bench import Bench", f"{RIGS}.bench.Bench"),
        (
            f"{PLUGIN}/rigs/cluster/model_bench.py",
            "from ..launch import start_zygote",
            f"{RIGS}.launch.start_zygote",
        ),
        (f"{PLUGIN}/cli.py", f"from {RIGS}.launch import x", f"{RIGS}.launch.x"),
        (
            f"{PLUGIN}/rigs/scenario.py",
            "from .bytes.faulty.nixl import Faults",
            f"{RIGS}.bytes.faulty.nixl.Faults",
        ),
        (f"{PLUGIN}/rigs/context.py", "from .engine import handle", f"{RIGS}.engine.handle"),
        (f"{PLUGIN}/suite/engine/bytes.py", "import vllm.config", "vllm.config"),
        (f"{PLUGIN}/report/terminal.py", "def f():\n    import torch.cuda as c", "torch.cuda"),
        (f"{PLUGIN}/plugin.py", "try:\n    from vllm import LLM\nexcept ImportError:\n    pass", "vllm.LLM"),
        (f"{PLUGIN}/rules/model.py", "import reference_connector.boxes", "reference_connector.boxes"),
        ("model_matrix/cells.py", f"import {PLUGIN}", PLUGIN),
        ("reference_connector/plan.py", f"from {PLUGIN}.kvspace import address", f"{PLUGIN}.kvspace.address"),
    ],
)
def test_the_walk_finds_a_planted_import(tmp_path: Path, file: str, source: str, finds: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    [found] = wrong_imports(tmp_path)
    assert found.startswith(f"{file}:")
    assert found.endswith(f" imports {finds}")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            f"{PLUGIN}/case.py",
            (
                f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {RIGS} import bench\n   "
                " import torch"
            ),
        ),
        (f"{PLUGIN}/rigs/engine/process.py", "import vllm, torch, numpy"),
        (
            f"{PLUGIN}/rigs/cluster/peers/bench.py",
            "from ...bytes.specs import x\nfrom ...scenario import y",
        ),
        (f"{PLUGIN}/rigs/vllm_setup/hooks.py", "from ..processes.ports import free_port\nimport nixl"),
        (
            f"{PLUGIN}/rigs/bench.py",
            "from .launch import start_zygote\nfrom .cluster.byte_bench import ByteBench",
        ),
        (f"{PLUGIN}/rigs/launch.py", f"x = '{RIGS}.scheduler.host'"),
        (f"{PLUGIN}/kvspace/rows/draw.py", "from ..kinds import SAME"),
        (f"{PLUGIN}/report/terminal.py", "import torchless"),
        (f"{PLUGIN}/kvspace/fill.py", "import re\nimport numpy.lib as np\nfrom .address import Address"),
        (
            f"{PLUGIN}/suite/engine/bytes.py",
            f"from {PLUGIN}.rigs.bench import Bench\nfrom {PLUGIN}.kvspace import diagnose",
        ),
    ],
)
def test_the_walk_lets_a_right_import_pass(tmp_path: Path, file: str, source: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    assert wrong_imports(tmp_path) == []
