# SPDX-License-Identifier: Apache-2.0
"""Does a vLLM still have what kvd's connectors override, call and read of it? Reads its source; neither imports nor
installs it.

    vllm_signatures.py                  the newest vLLM on the package index, of whose wheel only the files needed are
                                        fetched; exit status 77 means skipped: there is no index
    vllm_signatures.py FOLDER           the vLLM in FOLDER, for example site-packages
    vllm_signatures.py --self-test      finds what is planted

Types are followed as far as annotations tell them, in both directions: from kvd's code into vLLM's classes, and from the
calls in CALLERS to the methods that kvd overrides.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

KVD = Path(__file__).resolve().parents[2] / "client/python"
SKIPPED = 77
# Files of vLLM that call what kvd overrides, and the names that they have for instances of kvd's classes.
CALLERS = ("v1/core/sched/scheduler", "v1/core/kv_cache_manager", "v1/core/kv_cache_coordinator",
           "v1/core/single_type_kv_cache_manager", "v1/engine/core", "v1/worker/gpu_worker", "v1/worker/gpu/kv_connector",
           "v1/worker/gpu/model_runner", "v1/worker/kv_connector_model_runner_mixin", "config/vllm")
NAMES = {"KVCacheManager": ("kv_cache_manager",), "BlockPool": ("block_pool",), "BlockTables": ("block_tables",),
         "KVConnectorBase_V1": ("connector", "kv_connector", "connector_cls")}
# Types of attributes that vLLM does not annotate.
UNTOLD = {("KVCacheCoordinator", "single_type_managers"): "list[SingleTypeKVCacheManager]",
          ("KVCacheManager", "block_pool"): "BlockPool"}
CONTAINERS = ("list", "tuple", "set", "dict", "deque", "defaultdict", "Sequence", "Iterable", "Mapping")

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Type(NamedTuple):
    """An annotation, or a definition, and the module whose names it uses."""

    module: Module
    node: ast.AST


class Module:
    def __init__(self, name: str, text: str, is_package: bool):
        self.name, self.tree = name, ast.parse(text)
        self.package = name if is_package else name.rpartition(".")[0]
        self.names: dict[str, ast.AST] = {}             # top-level definitions
        self.imports: dict[str, tuple[str, str]] = {}   # name here: module, name there
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                origin = ".".join([*self.package.split(".")[:len(self.package.split(".")) - node.level + 1]]
                                  if node.level else []) + ("." if node.level and node.module else "")
                for it in node.names:
                    self.imports[it.asname or it.name] = origin + (node.module or ""), it.name
        for node in top_level(self.tree.body):
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if isinstance(target, ast.Name):
                    self.names[target.id] = node
            if isinstance(node, (ast.ClassDef, *Function)):
                self.names[node.name] = node


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also within if and try."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from top_level(node.body + node.orelse)


class World:
    """The modules of vLLM and of kvd. read: returns the text of a file below their common root, or None."""

    def __init__(self, read: Callable[[str], str | None]):
        self.read, self.modules = read, {}
        self.problems: list[str] = []

    def module(self, name: str) -> Module | None:
        if name not in self.modules:
            path = name.replace(".", "/")
            text, package = self.read(path + ".py"), False
            if text is None:
                text, package = self.read(path + "/__init__.py"), True
            self.modules[name] = None if text is None else Module(name, text, package)
        return self.modules[name]

    def find(self, module: Module, name: str) -> Type | None:
        """The definition of a name that a module uses, through its imports."""
        if name in module.names:
            return Type(module, module.names[name])
        origin, there = module.imports.get(name, ("", ""))
        other = self.module(origin) if origin.split(".")[0] in ("vllm", "kvd") else None
        return self.find(other, there) if other else None

    # ---- types

    def class_of(self, it: Type | None) -> Type | None:
        """The class that an annotation names; None if it names none of these modules."""
        if it is None or isinstance(it.node, ast.ClassDef):
            return it
        node = it.node
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.class_of(Type(it.module, ast.parse(node.value, mode="eval").body))
        if isinstance(node, ast.BinOp):         # X | None
            return self.class_of(Type(it.module, node.left)) or self.class_of(Type(it.module, node.right))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Optional", "type"):
            return self.class_of(Type(it.module, node.slice))
        found = self.find(it.module, node.id) if isinstance(node, ast.Name) else None
        return found if found and isinstance(found.node, ast.ClassDef) else None

    def element(self, it: Type | None) -> Type | None:
        if it and isinstance(it.node, ast.BinOp):
            it = Type(it.module, it.node.left)
        if it is None or not isinstance(it.node, ast.Subscript) or ast.unparse(it.node.value) not in CONTAINERS:
            return None
        inside = it.node.slice.elts if isinstance(it.node.slice, ast.Tuple) else [it.node.slice]
        inside = [node for node in inside if not isinstance(node, ast.Constant)]
        return Type(it.module, inside[-1])

    def bases(self, it: Type) -> Iterator[Type | None]:
        """A class and its bases; None for one that is defined elsewhere."""
        yield it
        for base in it.node.bases:
            found = self.class_of(Type(it.module, base))
            if found:
                yield from self.bases(found)
            elif ast.unparse(base) not in ("ABC", "Enum", "enum.Enum", "IntEnum", "Protocol", "object"):
                yield None

    def member(self, it: Type, name: str) -> Type | None:
        """Where a class or one of its bases defines a name, or assigns it to self."""
        for base in self.bases(it):
            if base and name in (own := own_members(base.node)):
                return Type(base.module, own[name])
        return None

    def derived(self, it: Type) -> Iterator[Type]:
        """Classes of kvd with this base: where vLLM passes them on, it names the base."""
        for module in filter(None, list(self.modules.values())):
            for node in module.names.values() if module.name.startswith("kvd") else ():
                if isinstance(node, ast.ClassDef) and node is not it.node and it.node in (
                        base and base.node for base in self.bases(Type(module, node))):
                    yield Type(module, node)

    def is_vllm(self, it: Type) -> bool:
        return any(base and base.module.name.startswith("vllm") for base in self.bases(it))

    def type_of_member(self, it: Type, name: str) -> Type | None:
        for base in self.bases(it):
            if base and (base.node.name, name) in UNTOLD:
                told = ast.parse(UNTOLD[base.node.name, name], mode="eval").body
                return Type(base.module, told)
        found = self.member(it, name)
        if found is None:
            return None
        if isinstance(found.node, Function):
            return Type(found.module, found.node.returns) if "property" in decorators(found.node) else found
        if isinstance(found.node, ast.AnnAssign):
            return Type(found.module, found.node.annotation)
        value = getattr(found.node, "value", None)
        called = self.find(found.module, value.func.id) if isinstance(value, ast.Call) and isinstance(
            value.func, ast.Name) else None
        if called and isinstance(called.node, Function) and called.node.returns:
            return Type(called.module, called.node.returns)
        return called if called and isinstance(called.node, ast.ClassDef) else None


def decorators(node: ast.AST) -> set[str]:
    return {ast.unparse(it).split(".")[-1] for it in node.decorator_list}


def own_members(node: ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for it in ast.walk(node):
        for target in getattr(it, "targets", [getattr(it, "target", None)]):
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    found.setdefault(part.attr, it if len(parts) == 1 else part)
    for it in node.body:
        for target in getattr(it, "targets", [getattr(it, "target", None)]):
            if isinstance(target, ast.Name):
                found[target.id] = it
        if isinstance(it, Function):
            found[it.name] = it
    return found


# ---- signatures ------------------------------------------------------------------------------------------------------


class Signature:
    def __init__(self, node: ast.AST, is_bound: bool):
        args = node.args
        plain = [it.arg for it in args.posonlyargs + args.args]
        first_default = len(plain) - len(args.defaults)
        skip = 1 if is_bound and "staticmethod" not in decorators(node) else 0
        self.positional = plain[skip:]
        self.needed = plain[skip:first_default]
        self.keywords = {*plain[skip:], *(it.arg for it in args.kwonlyargs)}
        self.needed_keywords = {it.arg for it, default in zip(args.kwonlyargs, args.kw_defaults) if default is None}
        self.more, self.more_keywords = bool(args.vararg), bool(args.kwarg)

    def refuses(self, n: int, keywords: set[str], *, open_end: bool) -> str | None:
        """Why a call with n positional arguments and these keywords fails; None if it does not. open_end: there may be
        more of both."""
        if n > len(self.positional) and not self.more:
            return f"takes {len(self.positional)} positional arguments, not {n}"
        if not self.more_keywords and (unknown := keywords - self.keywords):
            return f"has no parameter {', '.join(sorted(unknown))}"
        missing = [it for it in self.needed[n:] if it not in keywords] + sorted(self.needed_keywords - keywords)
        return f"needs {', '.join(missing)}" if missing and not open_end else None

    def replaces(self, theirs: Signature) -> str | None:
        """Why this cannot be called like theirs; None if it can."""
        if theirs.more and not self.more or theirs.more_keywords and not self.more_keywords:
            return "takes fewer arguments than *args or **kwargs"
        for mine, his in zip(self.positional, theirs.positional):
            if mine != his:
                return f"has {mine} where vLLM has {his}"
        least = self.refuses(len(theirs.needed), theirs.needed_keywords, open_end=False)
        most = self.refuses(0, theirs.keywords, open_end=True)
        if self.more:
            most = self.refuses(0, theirs.keywords - set(theirs.positional), open_end=True)
        return least or most


def arguments(call: ast.Call) -> tuple[int, set[str], bool]:
    starred = any(isinstance(it, ast.Starred) for it in call.args) or any(it.arg is None for it in call.keywords)
    return (sum(not isinstance(it, ast.Starred) for it in call.args), {it.arg for it in call.keywords if it.arg}, starred)


# ---- kvd's code against vLLM's ---------------------------------------------------------------------------------------


class Check(ast.NodeVisitor):
    """Walks one module of kvd. scope: the types of variables."""

    def __init__(self, world: World, module: Module):
        self.world, self.module, self.scope, self.owner = world, module, {}, None
        self.seen = 0
        for origin, name in module.imports.values():
            if origin.split(".")[0] == "vllm":
                other = world.module(origin)
                exists = other and ({name, "__getattr__"} & {*other.names, *other.imports}) or world.module(
                    f"{origin}.{name}")
                self.say(module.tree, exists, f"vLLM has no {origin}.{name}")
        self.visit(module.tree)

    def say(self, node: ast.AST, is_right: object, words: str) -> None:
        self.seen += 1
        if not is_right:
            self.world.problems.append(f"{self.module.name.replace('.', '/')}.py:{getattr(node, 'lineno', 1)}: {words}")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.owner = self.owner, Type(self.module, node)
        has: set[str] = set()       # members of the classes between this one and a base
        for base in self.world.bases(self.owner):
            if base and base.module.name.startswith("vllm"):
                self.compare(node, base, has)
            has |= {*own_members(base.node)} if base else set()
        self.generic_visit(node)
        self.owner = before

    def compare(self, node: ast.ClassDef, base: Type, has: set[str]) -> None:
        mine, theirs = own_members(node), own_members(base.node)
        for name, it in theirs.items():
            if isinstance(it, Function) and isinstance(mine.get(name), Function) and name != "__init__":
                self.replace(mine[name], it, f"{base.node.name}.{name}")
            elif isinstance(it, Function) and "abstractmethod" in decorators(it):
                self.say(node, name in has, f"{node.name} lacks {name}, which {base.node.name} leaves to it")

    def replace(self, mine: ast.AST, theirs: ast.AST, name: str) -> None:
        if "property" in decorators(theirs) or "property" in decorators(mine):
            self.say(mine, "property" in decorators(theirs) & decorators(mine), f"{name} is a property on one side")
            return
        why = Signature(mine, True).replaces(Signature(theirs, True))
        self.say(mine, why is None, f"{mine.name} {why}; vLLM's is {name}({ast.unparse(theirs.args)})")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self.scope = self.scope, dict(self.scope)
        for it in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if it.annotation:
                self.scope[it.arg] = Type(self.module, it.annotation)
        first = node.args.args[0].arg if node.args.args else ""
        if self.owner and first == "self":
            self.scope["self"] = self.owner
        elif first == "self" and (patched := self.world.class_of(self.scope.get("self"))):
            theirs = self.world.member(patched, node.name)
            self.say(node, theirs, f"vLLM's {patched.node.name} has no {node.name}")
            if theirs:
                self.replace(node, theirs.node, f"{patched.node.name}.{node.name}")
        self.generic_visit(node)
        self.scope = before

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    self.scope[name.id] = self.type_of(value)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for it in node.generators:
            self.bind(it.target, it.iter)
        self.generic_visit(node)

    visit_GeneratorExp = visit_ListComp

    def bind(self, target: ast.AST, iterated: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self.scope[target.id] = self.world.element(self.type_of(iterated))

    def type_of(self, node: ast.AST) -> Type | None:
        if isinstance(node, ast.Name):
            return self.scope.get(node.id) or self.world.find(self.module, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.world.class_of(self.type_of(node.value))
            return self.world.type_of_member(owner, node.attr) if owner else None
        if isinstance(node, ast.Subscript):
            return self.world.element(self.type_of(node.value))
        if isinstance(node, ast.Call):
            called = self.called(node.func)
            return Type(called.module, called.node.returns) if called and isinstance(
                called.node, Function) and called.node.returns else None
        return self.type_of(node.body) if isinstance(node, ast.IfExp) else None

    def called(self, node: ast.AST) -> Type | None:
        """The definition of a function or method that is called."""
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()" and self.owner:
                found = [self.world.member(base, node.attr) for base in list(self.world.bases(self.owner))[1:] if base]
                return next((it for it in found if it), None)
            owner = self.world.class_of(self.type_of(node.value))
            return self.world.member(owner, node.attr) if owner else None
        return self.world.find(self.module, node.id) if isinstance(node, ast.Name) else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self.world.class_of(self.type_of(node.value))
        if owner and self.world.is_vllm(owner) and not node.attr.startswith("__") and None not in self.world.bases(owner):
            is_there = any(self.world.member(it, node.attr) for it in (owner, *self.world.derived(owner)))
            self.say(node, is_there, f"{owner.node.name} has no {node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.called(node.func)
        if called and isinstance(called.node, Function) and called.module.name.startswith("vllm"):
            n, keywords, starred = arguments(node)
            why = Signature(called.node, isinstance(node.func, ast.Attribute)).refuses(n, keywords, open_end=starred)
            self.say(node, why is None, f"vLLM's {called.node.name} {why}")
        self.generic_visit(node)


def check_calls(world: World, modules: list[Module]) -> int:
    """Checks vLLM's calls of what kvd overrides. Returns how many there are."""
    mine: dict[str, list[tuple[Module, ast.AST]]] = {}      # by receiver and method
    for module in modules:
        for node in module.tree.body:
            for receiver, method in overrides(world, module, node):
                mine.setdefault(f"{receiver}.{method.name}", []).append((module, method))
    seen = 0
    for caller in filter(None, (world.module("vllm." + it.replace("/", ".")) for it in CALLERS)):
        for call in (it for it in ast.walk(caller.tree) if isinstance(it, ast.Call) and isinstance(it.func, ast.Attribute)):
            receiver = ast.unparse(call.func.value).split(".")[-1]
            for module, method in mine.get(f"{receiver}.{call.func.attr}", ()):
                n, keywords, starred = arguments(call)
                why, seen = Signature(method, True).refuses(n, keywords, open_end=starred), seen + 1
                if why:
                    world.problems.append(f"{caller.name.replace('.', '/')}.py:{call.lineno} calls {ast.unparse(call)};"
                                          f" {module.name}.{method.name} {why}")
    return seen


def overrides(world: World, module: Module, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The methods of vLLM's classes that a top-level definition of kvd replaces, by the names of their instances."""
    if isinstance(node, ast.ClassDef):
        for base in filter(None, world.bases(Type(module, node))):
            for receiver in NAMES.get(base.node.name, ()):
                yield from ((receiver, it) for it in node.body if isinstance(it, Function))
    elif isinstance(node, Function) and node.args.args and node.args.args[0].arg == "self":
        of = world.class_of(Type(module, node.args.args[0].annotation))
        yield from ((receiver, node) for receiver in NAMES.get(of.node.name if of else "", ()))


def check_habits(world: World) -> None:
    """What kvd relies on besides names: invented steps run with the connector disabled, and the KV cache is one
    allocation of bytes."""
    warmup = world.module("vllm.v1.worker.gpu.warmup")
    for node in warmup.tree.body if warmup else []:
        lines = {name: [it.lineno for it in ast.walk(node) if isinstance(it, ast.Call) and ast.unparse(it).startswith(name)]
                 for name in ("worker_execute_model(", "model_runner.kv_connector.set_disabled(True)")}
        steps, disabled = lines.values()
        if steps and not (disabled and min(disabled) < min(steps)):
            world.problems.append(f"vllm/v1/worker/gpu/warmup.py:{min(steps)}: a step runs before the connector is disabled")
    utils = world.module("vllm.v1.worker.utils")
    zeros = [it for it in ast.walk(utils.tree) if isinstance(it, ast.Call) and ast.unparse(it.func) == "torch.zeros"
             and len(it.args) == 1 and "dtype=torch.int8" in ast.unparse(it)] if utils else []
    if not warmup or not zeros:
        world.problems.append("vllm/v1/worker: no warm-up, or no allocation of the KV cache as bytes, where kvd expects it")


def check(read: Callable[[str], str | None], names: list[str]) -> tuple[list[str], int]:
    """Returns what is wrong, and how many things were compared. names: kvd's modules."""
    world = World(read)
    modules = [world.module(name) for name in names]
    seen = sum(Check(world, module).seen for module in modules) + check_calls(world, modules)
    check_habits(world)
    return world.problems, seen


# ---- where vLLM is ---------------------------------------------------------------------------------------------------


def from_folder(folder: Path) -> Callable[[str], str | None]:
    return lambda path: (folder / path).read_text() if (folder / path).is_file() else None


@contextmanager
def newest() -> Iterator[tuple[str, Callable[[str], str | None]]]:
    """The newest vLLM on the package index, and a function that reads its files. pip finds it and fetches parts of the
    wheel, as it does for metadata."""
    from pip._internal.commands import create_command
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP
    command = create_command("download")
    options, _ = command.parser.parse_args(["vllm", "--only-binary", ":all:", "--timeout", "60", "--retries", "1", "-qq"])
    with command.main_context():
        session = command.get_default_session(options)
        best = command._build_package_finder(options=options, session=session).find_best_candidate("vllm").best_candidate
        if best is None:
            raise OSError("it has no wheel of vllm for this machine, or there is no network")
        with LazyZipOverHTTP(best.link.url, session, chunk_size=1 << 18) as remote, zipfile.ZipFile(remote) as wheel:
            there = set(wheel.namelist())
            yield str(best.version), lambda path: wheel.read(path).decode() if path in there else None


def both(vllm: Callable[[str], str | None], kvd: Callable[[str], str | None]) -> Callable[[str], str | None]:
    return lambda path: (kvd if path.startswith("kvd/") else vllm)(path)


def judge(name: str, read: Callable[[str], str | None]) -> int:
    modules = sorted(f"kvd.engines.{it.stem}" for it in (KVD / "kvd/engines").glob("_vllm_*.py"))
    problems, seen = check(both(read, from_folder(KVD)), modules)
    print("\n".join([*problems, f"{name}: {seen} things that kvd overrides, calls and reads, {len(problems)} wrong"]))
    return 1 if problems or seen < 100 else 0


# ---- self-test -------------------------------------------------------------------------------------------------------

THEIRS = {
    "vllm/config/vllm.py": "class Cache:\n    dtype: str\nclass Config:\n    cache: 'Cache | None'\n    parts: list[Cache]\n",
    "vllm/v1/core/kv_cache_manager.py": """
from abc import ABC, abstractmethod
from vllm.config.vllm import Config
def cdiv(a, b):
    return a
class KVCacheManager(ABC):
    def __init__(self, config: Config):
        self.config: Config = config
        self.limit = 5
    def get(self, request, most=None, *, extra=None):
        return cdiv(request, 1)
    def put(self, request, **more):
        pass
    @abstractmethod
    def reset(self):
        pass
""",
    "vllm/v1/core/sched/scheduler.py": "def run(self, request):\n    self.kv_cache_manager.get(request, 3)\n",
    "vllm/v1/worker/gpu/warmup.py": "def warm(model_runner, worker_execute_model):\n"
                                    "    model_runner.kv_connector.set_disabled(True)\n    worker_execute_model(1)\n",
    "vllm/v1/worker/utils.py": "memory = torch.zeros(size, dtype=torch.int8, device=device)\n",
    "kvd/engines/mine.py": """
from vllm.v1.core.kv_cache_manager import KVCacheManager, cdiv
class Manager(KVCacheManager):
    def get(self, request, most=None, **options):
        cache, parts = self.config.cache, self.config.parts
        for it in parts:
            it.dtype
        return super().get(request, most, **options), cache.dtype, cdiv(self.limit, 2)
    def reset(self):
        pass
""",
}
PLANTED = [     # a file, what is replaced in it, by what, and the complaint
    ("vllm/v1/core/kv_cache_manager.py", "most=None", "most=None, least=0", None),                  # through **options
    ("vllm/v1/core/kv_cache_manager.py", "get(self, request, most=None", "get(self, request, least, most=None",
     "has most where vLLM has least"),
    ("vllm/v1/core/kv_cache_manager.py", "def reset", "def reset(self):\n        pass\n    @abstractmethod\n    def clear",
     "Manager lacks clear"),
    ("vllm/v1/core/kv_cache_manager.py", "self.limit", "self.bound", "Manager has no limit"),
    ("vllm/v1/core/kv_cache_manager.py", "def cdiv(a, b)", "def cdiv(a, b, c)", "cdiv needs c"),
    ("vllm/v1/core/kv_cache_manager.py", "def cdiv", "def ceil", "no vllm.v1.core.kv_cache_manager.cdiv"),
    ("vllm/config/vllm.py", "dtype: str", "kind: str", "Cache has no dtype"),
    ("vllm/config/vllm.py", "    cache:", "    caches:", "Config has no cache"),
    ("vllm/v1/core/sched/scheduler.py", "request, 3", "request, 3, 4", "takes 2 positional arguments, not 3"),
    ("vllm/v1/worker/gpu/warmup.py", "(True)", "(False)", "before the connector is disabled"),
    ("vllm/v1/worker/utils.py", "int8", "float32", "no allocation of the KV cache"),
    ("kvd/engines/mine.py", "most=None, **options):", "**options):", "takes 1 positional arguments, not 2"),
    ("kvd/engines/mine.py", "most=None, **options):", "most=None):\n        options = {}", "has no parameter extra"),
]


def self_test() -> int:
    def complaints(**changes: str) -> list[str]:
        files = THEIRS | changes
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, path).write_text(text)
            return check(from_folder(Path(folder)), ["kvd.engines.mine"])[0]

    assert complaints() == [], complaints()
    for path, old, new, words in PLANTED:
        assert old in THEIRS[path], (path, old)
        found = complaints(**{path: THEIRS[path].replace(old, new)})
        assert (words is None and not found) or any(words in it for it in found if words), (path, new, words, found)
    print(f"{len(PLANTED)} planted changes were found, or are harmless")
    return 0


def main(arguments: list[str]) -> int:
    if arguments == ["--self-test"]:
        return self_test()
    if arguments:
        return judge(arguments[0], from_folder(Path(arguments[0])))
    try:
        with newest() as (version, read):
            return judge(f"vLLM {version}", read)
    except Exception as error:          # pip's own kinds of errors, and of the libraries inside of it
        if isinstance(error, (SyntaxError, AssertionError, KeyError, IndexError)):
            raise
        print(f"skipped: the package index cannot be read: {type(error).__name__}: {error}")
        return SKIPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
