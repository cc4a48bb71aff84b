"""Imports point to lower layers, modules have no import cycle, and light packages stay light."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "kl_comedy"
FILES = sorted(ROOT.rglob("*.py"))
LAYERS = [
    [
        "errors",
        "lazy",
        "redaction",
        "plugins",
        "registry",
        "records",
        "io",
        "processes",
        "cuda",
        "config",
        "extras",
        "phases",
        "progress",
    ],
    ["kl", "objective", "statistics"],
    ["models", "rewards", "data", "rollouts", "tracking", "results"],
    ["evaluation", "training", "slurm", "audit", "planning", "peers", "integrations", "conformance"],
    ["api", "pytest_plugin"],
    ["cli"],
]
WITHIN_A_LAYER = {
    ("registry", "errors"),
    ("registry", "plugins"),
    ("plugins", "errors"),
    ("plugins", "redaction"),
    ("io", "errors"),
    ("redaction", "errors"),
    ("processes", "errors"),
    ("extras", "errors"),
    ("progress", "phases"),
    ("processes", "io"),
    ("config", "errors"),
    ("config", "registry"),
    ("config", "records"),
    ("config", "io"),
    ("config", "redaction"),
    ("kl", "objective"),  # the oracle puts the algorithm around the terms
    ("models", "data"),  # the pocket policy is pretrained on demonstrations of its own problems
    ("rollouts", "rewards"),  # a dialogue asks an environment, which is in the workers of rewards
    ("rollouts", "models"),  # the sampler runs the policy with the models' attention
    ("training", "evaluation"),  # a run evaluates between updates
    ("slurm", "training"),  # cells are runs: their plugins and folders
    ("results", "tracking"),  # what reads the store knows how it is written
    ("audit", "training"),  # audits train and load policies
    ("integrations", "audit"),  # the audit inside other trainers
}
LIGHT = [  # one process each, in this order: a package is light if nothing before it is heavier
    {
        "kl_comedy": ["torch", "omegaconf", "typer", "rich", "numpy", "pandas", "kl_comedy.kl"],
        "kl_comedy.statistics": ["mlflow", "pandas", "scipy", "numpy", "torch"],
        "kl_comedy.cuda": ["torch"],
        "kl_comedy.tracking": ["mlflow", "pandas", "matplotlib", "torch"],
        "kl_comedy.config": ["torch", "transformers", "lightning", "mlflow"],
        "kl_comedy.cli.main": ["torch", "transformers", "lightning", "mlflow", "pandas"],
        # Terms are data: torch takes longer to import than `kl-comedy explain` takes to answer.
        "kl_comedy.kl": ["torch", "omegaconf"],
        "kl_comedy.kl.oracle.stored_certificates": ["torch", "omegaconf"],
        "kl_comedy.peers.launch_files": ["torch", "omegaconf"],
    },
    {
        "kl_comedy.kl": ["omegaconf", "transformers", "lightning", "mlflow", "vllm", "datasets", "pandas"],
        "kl_comedy.objective": ["omegaconf", "transformers", "lightning", "mlflow", "vllm"],
        "kl_comedy.peers.systems": ["transformers", "lightning", "mlflow", "vllm", "pandas", "omegaconf"],
        "kl_comedy.api": ["transformers", "lightning", "mlflow", "datasets", "pandas", "typer"],
        "kl_comedy.conformance": ["transformers", "lightning", "mlflow", "datasets", "pandas"],
        "kl_comedy.data": ["datasets", "reasoning_gym", "transformers"],
        "kl_comedy.rewards": ["math_verify", "reasoning_gym", "transformers"],
    },
    {
        # pytest imports the plugin in every run; conformance is what another project installs for its tests.
        "kl_comedy.pytest_plugin": ["torch", "numpy", "omegaconf", "typer", "rich"],
        "kl_comedy.conformance": ["omegaconf", "typer", "yaml", "pandas", "transformers", "lightning", "mlflow"],
    },
]


def imported_names(nodes):
    """Dotted names of ours that the nodes import: modules, and names within modules."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("kl_comedy."):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""  # "from . import x" has none
            if module.split(".")[0] == "kl_comedy":
                for alias in node.names:
                    yield f"{module}.{alias.name}"


def names_in_import_calls(nodes):
    """Dotted names of ours that are constants in calls of ``importlib.import_module`` and ``__import__``."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func).rpartition(".")[2]
        if function not in ("import_module", "__import__") or not node.args:
            continue
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("kl_comedy."):
            yield argument.value


def executed_on_import(nodes):
    """Import statements that run when the module is imported: not those in functions or under TYPE_CHECKING."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            first_line = ast.unparse(node).split("\n")[0]
            if "TYPE_CHECKING" not in first_line:
                yield from executed_on_import(ast.iter_child_nodes(node))


def test_packages_import_lower_layers_only():
    layer_of = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
    wrong = []
    for file in FILES:
        package = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if package in ("__init__", "__main__"):
            continue
        nodes = ast.walk(ast.parse(file.read_text()))
        imported_packages = {name.split(".")[1] for name in imported_names(nodes)}
        for other in imported_packages - {package}:
            assert package in layer_of, f"{file}: {package} has no layer"
            assert other in layer_of, f"{file}: {other} has no layer"
            is_lower = layer_of[other] < layer_of[package]
            if not is_lower and (package, other) not in WITHIN_A_LAYER:
                wrong.append(f"{file.relative_to(ROOT)} imports {other}")
    assert wrong == []


def test_no_package_imports_another_by_a_string():
    by_string = set()
    for file in FILES:
        path = file.relative_to(ROOT)
        for name in names_in_import_calls(ast.walk(ast.parse(file.read_text()))):
            if name.split(".")[1] != path.parts[0]:
                by_string.add((str(path), name))
    assert by_string == set()


def test_config_imports_nothing_above_it_not_by_a_string_either():
    """Nor does it import what a field or a table names: it has no call that imports."""
    above = [package for packages in LAYERS[1:] for package in packages]
    for file in (ROOT / "config").glob("*.py"):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func).rpartition(".")[2]
                assert function not in ("import_module", "__import__"), f"{file.name}: {ast.unparse(node)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                named = [package for package in above if f"kl_comedy.{package}" in node.value]
                assert named == [], f"{file.name}, line {node.lineno}: {node.value!r}"
        for name in imported_names(ast.walk(tree)):
            assert name.split(".")[1] not in above, f"{file.name} imports {name}"


def test_modules_have_no_import_cycle():
    modules = {}
    for file in FILES:
        dotted = ".".join(["kl_comedy", *file.relative_to(ROOT).with_suffix("").parts])
        modules[dotted.removesuffix(".__init__")] = file
    graph = {}
    for name, file in modules.items():
        targets = set()
        for imported in imported_names(executed_on_import(ast.parse(file.read_text()).body)):
            if imported not in modules:
                imported = imported.rpartition(".")[0]  # a name within a module
            if imported in modules and imported != name:
                targets.add(imported)
        graph[name] = targets
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None


def test_importing_a_package_imports_nothing_heavy():
    heavy = []
    for packages in LIGHT:
        code = "import importlib, sys\n"
        for package, forbidden in packages.items():
            code += f"importlib.import_module({package!r})\n"
            code += f"heavy = [name for name in {forbidden!r} if name in sys.modules]\n"
            code += f"if heavy: print({package!r}, 'imports', *heavy)\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        heavy += done.stdout.splitlines()
    assert heavy == []
