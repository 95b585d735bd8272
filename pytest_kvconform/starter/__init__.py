"""Command `kvconform new NAME`: a small connector that conforms, its declaration and a CI job, as new files.

The folder `files` has them as they are read and tested here, for the module `starter_connector` and the class
`StarterConnector`. Written are the same texts with the names of the new connector.
"""

from __future__ import annotations

import importlib.machinery
import keyword
import re
import sys
from pathlib import Path

from pytest_kvconform.settings import BadSetting

FILES = Path(__file__).parent / "files"
MODULE, CLASS = "starter_connector", "StarterConnector"
_LONGEST_NAME = 100  # file systems take no longer name than 255 bytes
# file here -> file of the new connector
TARGETS = {
    "connector.py.txt": "{module}.py",
    "declaration.toml": "pyproject.toml",
    "workflow.yml": ".github/workflows/kvconform.yml",
}
IGNORED = "gitignore", ".gitignore"  # of what runs write; a file that exists has rules of its own, and stays


def write(name: str, folder: Path) -> list[Path]:
    """Write the files of a connector into a folder, and return their paths below it.

    Raises BadSetting, and leaves nothing behind, for a name that no module of this folder can have, if one of
    the files exists, and if the folder cannot be written.
    """
    _check_name(name)
    paths = [Path(target.format(module=name)) for target in TARGETS.values()]
    if there := [str(path) for path in paths if (folder / path).exists() or (folder / path).is_symlink()]:
        raise BadSetting(
            f"{' and '.join(there)} {'exists' if len(there) == 1 else 'exist'} already, and nothing was "
            "written: kvconform new overwrites no file, so start it in an empty folder"
        )
    written: list[Path] = []
    sources = dict(zip(TARGETS, paths, strict=True))
    ignored = folder / IGNORED[1]
    if not ignored.exists() and not ignored.is_symlink():
        sources[IGNORED[0]] = Path(IGNORED[1])
    try:
        for source, path in sources.items():
            text = (FILES / source).read_text("utf-8").replace(MODULE, name).replace(CLASS, class_name(name))
            for parent in reversed((folder / path).parents):
                if not parent.exists():
                    parent.mkdir()
                    written.append(parent)
            with (folder / path).open("x", encoding="utf-8") as file:
                written.append(folder / path)
                file.write(text)
    except OSError as error:
        for one in reversed(written):
            one.rmdir() if one.is_dir() else one.unlink()
        raise BadSetting(f"the files could not be written: {error.strerror}: {error.filename}") from error
    return [*sources.values()]


def class_name(module: str) -> str:
    """The name of the class in a module: my_files -> MyFilesConnector."""
    words = "".join(word[:1].upper() + word[1:] for word in module.split("_"))
    return words if words.endswith("Connector") else f"{words}Connector"


def _check_name(name: str) -> None:
    """Raise BadSetting if a module of the folder in which pytest is started cannot have this name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        words = re.findall(
            r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix(".py")).lower()
        )
        better = "_".join(words).lstrip("0123456789_")
        hint = f" (did you mean {better}?)" if better and not keyword.iskeyword(better) else ""
        raise BadSetting(
            f"{name!r} is no name for a connector: it names a Python module, and so has lower-case letters, "
            f"digits and _, begins with a letter, and is no word of Python's own{hint}"
        )
    if len(name) > _LONGEST_NAME:
        raise BadSetting(f"a name has at most {_LONGEST_NAME} letters, and this one has {len(name)}")
    if name == "conftest" or name.startswith("test_") or name.endswith("_test"):
        raise BadSetting(f"pytest itself would load {name}.py as a file of tests: choose another name")
    if name in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(name, _installed()):
        raise BadSetting(
            f"a module {name} is installed here already, and Python would find that one: choose another name"
        )


def _installed() -> list[str]:
    """Where Python finds installed modules: not in the folder in which the command was started."""
    here = Path.cwd()
    return [place for place in sys.path if place and Path(place).resolve() != here]
