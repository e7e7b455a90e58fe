"""The rules of the code's layout, read off the sources: who imports whom, what is forbidden, how long things get.

Imports inside functions count. Each rule is a function of one module that returns what it finds; the second half of
this file shows every rule finding a planted fault.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

# a module may import its own level and the levels below; the longest matching name counts. A new module needs a place.
LEVELS = {
    "distdec.config": 0,
    "distdec.config_keys": 0,
    "distdec.request": 0,
    "distdec.degrees": 0,
    "distdec.ops": 0,
    "distdec.cache": 1,
    "distdec.mesh": 1,
    "distdec.merge_choice": 1,
    "distdec.capacity": 1,
    "distdec.progress": 1,
    "distdec.step_cost": 1,
    "distdec.scheduler": 2,
    "distdec.replay": 2,
    "distdec.merge_place": 2,
    "distdec.merge_modes": 2,
    "distdec.merge_collective": 2,
    "distdec.merge_measure": 2,
    "distdec.slabs": 2,
    "distdec.one_shot": 2,
    "distdec.rank_sum": 2,
    "distdec.row_tables": 2,
    "distdec.host_pool": 2,
    "distdec.residence": 2,
    "distdec.merge": 3,
    "distdec.batch": 3,
    "distdec.sharded_cache": 3,
    "distdec.sampling": 3,
    "distdec.speculative": 1,
    "distdec.completion": 1,
    "distdec.arrival": 1,
    "distdec.attention": 4,
    "distdec.detokenize": 4,
    "distdec.planner": 4,
    "distdec.hf": 5,
    "distdec.graphs": 5,
    "distdec.model_graphs": 5,
    "distdec.sizing": 5,
    "distdec.load": 5,
    "distdec.runner": 5,
    "distdec.engine": 6,
    "distdec.serving": 7,
    "distdec.testing": 7,
    "distdec": 8,
}
TORCH_FREE = (
    "distdec.config",
    "distdec.config_keys",
    "distdec.degrees",
    "distdec.request",
    "distdec.progress",
    "distdec.speculative",
    "distdec.step_cost",
    "distdec.scheduler",
    "distdec.replay",
    "distdec.residence",
    "distdec.merge_choice",
    "distdec.row_tables",
    "distdec.cache",
    "distdec.capacity",
)
TALKS_TO_RANKS = (
    "distdec.mesh",
    "distdec.merge_collective",
    "distdec.slabs",
    "distdec.rank_sum",
    "distdec.hf.linears",
)
# functions whose parameters are the contract itself
MANY_PARAMETERS = {"distdec.attention.__call__"}
UNPICKLERS = ("pickle", "cloudpickle", "dill", "marshal", "shelve")


class Module(NamedTuple):
    """One source file."""

    name: str
    path: str
    source: str
    tree: ast.Module


class Import(NamedTuple):
    """One imported name: the full dotted name, its line, and whether the import stands inside a function."""

    name: str
    line: int
    lazy: bool


def module_of(path, source):
    """Parse a file given by its path from the root: `distdec/ops/decode.py` is the module `distdec.ops.decode`."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Module(name, path, source, ast.parse(source))


def read_modules():
    paths = sorted(p for top in ("distdec", "launch", "scripts") for p in (ROOT / top).rglob("*.py"))
    return [module_of(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def imports_of(module):
    found = []

    def visit(node, lazy):
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".")
                keep = len(package) - node.level + module.path.endswith("__init__.py")
                base = ".".join([*package[:keep], *filter(None, [base])])
            found.extend(Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(module.tree, False)
    return found


def within(name, *roots):
    return any(name == root or name.startswith(root + ".") for root in roots)


def level_of(name):
    return LEVELS[max((root for root in LEVELS if within(name, root)), key=len)]


def in_package(module):
    return within(module.name, "distdec")


def is_triton_file(module):
    return module.path.endswith("_triton.py")


# ---- the rules


def imports_upwards(module):
    """`config, request, ops <- cache, mesh <- scheduler, merge <- attention <- hf, runner <- engine <- serving`."""
    if not in_package(module):
        return []
    if level_of(module.name) == LEVELS["distdec"] and module.path != "distdec/__init__.py":
        return [f"{module.name} has no place in LEVELS"]
    mine = level_of(module.name)
    ours = [found for found in imports_of(module) if within(found.name, "distdec")]
    return [
        f"line {i.line}: level {mine} imports {i.name}, level {level_of(i.name)}"
        for i in ours
        if level_of(i.name) > mine
    ]


def ops_import_only_ops_and_torch(module):
    if not within(module.name, "distdec.ops"):
        return []
    return [
        f"line {i.line}: {i.name}"
        for i in imports_of(module)
        if (within(i.name, "distdec") and not within(i.name, "distdec.ops")) or within(i.name, "torch.distributed")
    ]


def triton_outside_triton_files(module):
    """Twins are imported where they are used, inside a function, so that the rest runs without Triton."""
    if not in_package(module) or is_triton_file(module):
        return []
    twins = [i for i in imports_of(module) if any(part.endswith("_triton") for part in i.name.split("."))]
    direct = [i for i in imports_of(module) if within(i.name, "triton")]
    return [f"line {i.line}: {i.name}" for i in direct + [twin for twin in twins if not twin.lazy]]


def torch_in_integer_code(module):
    if not within(module.name, *TORCH_FREE) or module.name == "distdec.cache.pool":
        return []
    with_torch = ("torch", "triton", "transformers", "distdec.cache.pool")
    return [f"line {i.line}: {i.name}" for i in imports_of(module) if within(i.name, *with_torch)]


def hydra_in_the_package(module):
    if not in_package(module):
        return []
    return [f"line {i.line}: {i.name}" for i in imports_of(module) if within(i.name, "hydra", "omegaconf")]


def environment_outside_the_mesh(module):
    if not in_package(module) or module.name == "distdec.mesh":
        return []
    found = [
        f"line {i.line}: {i.name}" for i in imports_of(module) if i.name in ("os.environ", "os.getenv", "os.putenv")
    ]
    used = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    names = ("environ", "getenv", "putenv")
    return found + [f"line {node.lineno}: {ast.unparse(node)}" for node in used if node.attr in names]


def ranks_talk_elsewhere(module):
    if not in_package(module) or module.name in TALKS_TO_RANKS:
        return []
    found = [f"line {i.line}: {i.name}" for i in imports_of(module) if within(i.name, "torch.distributed")]
    used = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    return found + [
        f"line {node.lineno}: {ast.unparse(node)}" for node in used if ast.unparse(node) == "torch.distributed"
    ]


def called_names(module):
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            yield node.lineno, node.attr if isinstance(node, ast.Attribute) else node.id
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)


def groups_made_outside_the_mesh(module):
    makers = ("init_process_group", "new_group", "new_subgroups", "init_device_mesh", "split_group")
    if not in_package(module) or module.name == "distdec.mesh":
        return []
    return [f"line {line}: {name}" for line, name in called_names(module) if name in makers]


def unpickling(module):
    """Nothing that travels or lies on a disk may run code here."""
    if not in_package(module):
        return []
    found = [f"line {i.line}: {i.name}" for i in imports_of(module) if within(i.name, *UNPICKLERS)]
    found += [f"line {i.line}: {i.name}" for i in imports_of(module) if i.name == "torch.load"]
    for line, name in called_names(module):
        if name.endswith(("_object", "_object_list")) and name.split("_")[0] in (
            "all",
            "gather",
            "broadcast",
            "scatter",
        ):
            found.append(f"line {line}: {name}")
        if name.endswith("_object_list") and name.split("_")[0] in ("send", "recv"):
            found.append(f"line {line}: {name}")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "torch.serialization.load"):
                found.append(f"line {node.lineno}: {called}")
    return found


def global_statements(module):
    return [f"line {node.lineno}: global" for node in ast.walk(module.tree) if isinstance(node, ast.Global)]


def over_the_budget(module):
    """Lines of a file and of a function's body, parameters of a function outside ops."""
    file_budget, function_budget = (600, 120) if is_triton_file(module) else (400, 60)
    found = []
    lines = module.source.count("\n")
    if lines > file_budget:
        found.append(f"{lines} lines, budget {file_budget}")
    for node in ast.walk(module.tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        # the formatter gives each parameter of a kernel its own line: the signature has a budget of its own
        length = node.end_lineno - node.body[0].lineno + 1 - docstring_lines(node)
        if length > function_budget:
            found.append(f"line {node.lineno}: {node.name} has {length} lines, budget {function_budget}")
        count = num_parameters(node)
        kernels = within(module.name, "distdec.ops") or f"{module.name}.{node.name}" in MANY_PARAMETERS
        # constructors list their settings by name
        if in_package(module) and node.name != "__init__" and not kernels and count > 8:
            found.append(f"line {node.lineno}: {node.name} has {count} parameters, budget 8")
    return found


def num_parameters(node):
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def docstring_lines(node):
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.end_lineno - first.lineno + 1
    return 0


RULES = [
    imports_upwards,
    ops_import_only_ops_and_torch,
    triton_outside_triton_files,
    torch_in_integer_code,
    hydra_in_the_package,
    environment_outside_the_mesh,
    ranks_talk_elsewhere,
    groups_made_outside_the_mesh,
    unpickling,
    global_statements,
    over_the_budget,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_keep_the_rule(rule):
    modules = read_modules()
    assert len(modules) > 10
    broken = [f"{module.path}: {fault}" for module in modules for fault in rule(module)]
    assert not broken, "\n".join(broken)


def test_imports_have_no_cycle():
    modules = {module.name: module for module in read_modules()}
    assert not find_cycle(modules)


def find_cycle(modules):
    """Return the modules of an import cycle, or None; lazy imports count."""
    edges = {}
    for name, module in modules.items():
        targets = set()
        for found in imports_of(module):
            # `from package import module` names a module, `from module import thing` does not
            target = found.name if found.name in modules else found.name.rpartition(".")[0]
            if target in modules and target != name:
                targets.add(target)
        edges[name] = targets
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        path.append(name)
        cycle = next(filter(None, map(visit, sorted(edges[name]))), None)
        path.pop()
        done.add(name)
        return cycle

    return next(filter(None, map(visit, sorted(edges))), None)


# ---- each rule finds its planted fault

PLANTED = [
    (imports_upwards, "distdec/mesh.py", "from distdec.merge import Merge"),
    (imports_upwards, "distdec/mesh.py", "def f():\n    import distdec.engine"),
    (imports_upwards, "distdec/scheduler.py", "from distdec import attention"),
    (imports_upwards, "distdec/cache/layout.py", "from ..scheduler import Scheduler"),
    (imports_upwards, "distdec/newcomer.py", "import torch"),
    (ops_import_only_ops_and_torch, "distdec/ops/decode.py", "from distdec.request import Row"),
    (ops_import_only_ops_and_torch, "distdec/ops/decode_triton.py", "import torch.distributed as dist"),
    (triton_outside_triton_files, "distdec/attention.py", "def f():\n    import triton.language as tl"),
    (triton_outside_triton_files, "distdec/ops/backends.py", "from distdec.ops import decode_triton"),
    (triton_outside_triton_files, "distdec/ops/backends.py", "from .decode_triton import decode"),
    (torch_in_integer_code, "distdec/cache/allocator.py", "def f():\n    from torch import Tensor"),
    (torch_in_integer_code, "distdec/cache/kv_cache.py", "from .pool import KVPool"),
    (torch_in_integer_code, "distdec/config.py", "import torch"),
    (hydra_in_the_package, "distdec/config.py", "from omegaconf import MISSING"),
    (hydra_in_the_package, "distdec/hf/weights.py", "def f():\n    import hydra"),
    (environment_outside_the_mesh, "distdec/merge.py", "import os\nX = os.environ.get('A')"),
    (environment_outside_the_mesh, "distdec/engine.py", "from os import getenv"),
    (ranks_talk_elsewhere, "distdec/attention.py", "def f():\n    from torch.distributed import all_reduce"),
    (ranks_talk_elsewhere, "distdec/batch.py", "import torch\ntorch.distributed.barrier()"),
    (groups_made_outside_the_mesh, "distdec/hf/parallel.py", "dist.new_group([0])"),
    (groups_made_outside_the_mesh, "distdec/merge.py", "from torch.distributed import init_process_group"),
    (unpickling, "distdec/mesh.py", "import pickle"),
    (unpickling, "distdec/mesh.py", "dist.broadcast_object_list([1])"),
    (unpickling, "distdec/mesh.py", "dist.all_gather_object(a, b)"),
    (unpickling, "distdec/hf/weights.py", "state = torch.load(path)"),
    (unpickling, "distdec/config.py", "x = eval(text)"),
    (global_statements, "launch/boot.py", "def f():\n    global x\n    x = 1"),
    (over_the_budget, "distdec/engine.py", "x = 1\n" * 401),
    (over_the_budget, "distdec/ops/decode_triton.py", "x = 1\n" * 601),
    (over_the_budget, "scripts/bench_ops.py", "def f():\n" + "    x = 1\n" * 61),
    (over_the_budget, "distdec/ops/decode_triton.py", "def f():\n" + "    x = 1\n" * 121),
    (over_the_budget, "distdec/batch.py", "def f(a, b, c, d, e, f, *, g, h, i): ..."),
]


@pytest.mark.parametrize(("rule", "path", "source"), PLANTED)
def test_the_rule_finds_a_planted_fault(rule, path, source):
    assert rule(module_of(path, source))


HARMLESS = [
    ("distdec/ops/backends.py", "def f():\n    from distdec.ops import decode_triton"),
    ("distdec/ops/decode_triton.py", "import triton\nimport torch\nfrom distdec.ops.partial import Partial"),
    ("distdec/cache/pool.py", "import torch"),
    ("distdec/cache/kv_cache.py", "import numpy\nfrom .layout import View"),
    ("distdec/mesh.py", "import os\nimport torch.distributed as dist\nos.environ\ndist.new_group([0])"),
    ("distdec/engine.py", "from distdec.attention import X\nmodel.eval()\nsafetensors.load(path)"),
    ("distdec/__init__.py", "from distdec.engine import Engine"),
    ("launch/boot.py", "import hydra\nimport os\nos.environ"),
    ("distdec/ops/decode.py", "def f(a, b, c, d, e, f, g, h, i): ..."),
    ("distdec/batch.py", 'def f():\n    """' + "x\n" * 80 + '    """\n'),
]


@pytest.mark.parametrize(("path", "source"), HARMLESS)
def test_no_rule_minds_what_is_allowed(path, source):
    assert not [fault for rule in RULES for fault in rule(module_of(path, source))]


def test_a_planted_cycle_is_found():
    sources = {"a": "from distdec.b import x", "b": "def f():\n    from distdec import c", "c": "import distdec.a"}
    modules = {f"distdec.{name}": module_of(f"distdec/{name}.py", source) for name, source in sources.items()}
    assert set(find_cycle(modules)) == set(modules)
    del modules["distdec.c"]
    assert find_cycle(modules) is None
